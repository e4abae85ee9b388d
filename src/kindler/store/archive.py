"""One version as one file: a zip of its files and of what the catalog says, with hashes. Executes nothing.

kindler.json     format, name, shelf, kind, meta, attributes, and path, SHA-256 and size of each file
files/PATH       the files
"""

from __future__ import annotations

import json
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kindler.errors import ConfigError, DamagedError
from kindler.store.hashing import copy_hashed
from kindler.store.names import check_name
from kindler.store.store import Store
from kindler.store.versions import File, Version, as_json, check_files

__all__ = ["Archived", "Stages", "reading", "write"]

_FORMAT = 1
_TOLD = "kindler.json"
_TOLD_BYTES = 16 << 20
_KNOWN = ("name", "shelf", "kind", "meta", "attributes")
# `write` packs nothing; an archive of others may unpack to so many times its size.
_RATIO, _UNPACKED_BYTES = 100, 64 << 20
# What reading a zip of others can raise: it may be cut off, locked, or packed in an unknown way.
_MALFORMED = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    ValueError,
    RuntimeError,
    NotImplementedError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Archived:
    """What an archive says of itself.

    Attributes:
        name: The name that the version had.
        shelf: The shelf that it was on.
        kind: What will read it.
        meta: What the reader must know.
        attributes: What the user wanted to remember.
        files: Its files.
    """

    name: str
    shelf: str
    kind: str
    meta: dict[str, Any]
    attributes: dict[str, Any]
    files: tuple[File, ...]


class Stages(Protocol):
    """Who has room for the files of an archive; a store has."""

    def stage(self) -> AbstractContextManager[Path]:
        """An empty folder, gone after the block."""


def write(store: Store, version: Version, path: Path) -> None:
    """Write a version to a file, which appears when it is whole."""
    told = {key: getattr(version, key) for key in _KNOWN}
    told |= {"format": _FORMAT, "files": [[file.path, file.sha256, file.size] for file in version.files]}
    beside = path.with_name(f".{path.name}.unfinished")
    try:
        with store.files(version) as folder, zipfile.ZipFile(beside, "w") as archive:
            archive.writestr(_TOLD, as_json(told))
            for file in version.files:
                archive.write(folder / file.path, f"files/{file.path}")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def reading(store: Stages, path: Path) -> Iterator[tuple[Archived, Path]]:
    """What an archive holds, and its files in a folder, checked.

    Raises:
        ConfigError: It is no archive of Kindler's, or names files that lead elsewhere.
        DamagedError: A file in it is not what the archive says.
    """
    with store.stage() as folder:
        try:
            with zipfile.ZipFile(path) as archive:
                told = _told(archive, path)
                for file in told.files:
                    _extract(archive, file, folder)
        except (ConfigError, DamagedError):
            raise
        except _MALFORMED as exc:
            raise ConfigError(f"{path} is no whole archive: {str(exc) or type(exc).__name__}.") from exc
        yield told, folder


def _told(archive: zipfile.ZipFile, path: Path) -> Archived:
    try:
        entry = archive.getinfo(_TOLD)
        if entry.file_size > _TOLD_BYTES:
            raise ConfigError(f"{path} is no archive of a store: {_TOLD} in it is too large.")
        told = json.loads(archive.read(entry))
        if told["format"] != _FORMAT:
            raise ConfigError(f"{path} has the format {told['format']!r}, and this Kindler knows {_FORMAT}.")
        files = tuple(File(str(name), str(sha256), int(size)) for name, sha256, size in told["files"])
        fields = {key: told[key] for key in _KNOWN}
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{path} is no archive of a store: {exc!r}.") from exc
    check_name(fields["name"])
    check_files(files)
    kinds = {"shelf": str, "kind": str, "meta": dict, "attributes": dict}
    wrong = [key for key, kind in kinds.items() if not isinstance(fields[key], kind)]
    if wrong:
        raise ConfigError(f"{path} is no archive of a store: its {wrong[0]} is {fields[wrong[0]]!r}.")
    total, at_most = sum(file.size for file in files), _RATIO * path.stat().st_size + _UNPACKED_BYTES
    if total > at_most:
        raise ConfigError(f"{path} unpacks to {total} bytes, and may to {at_most}.")
    return Archived(files=files, **fields)


def _extract(archive: zipfile.ZipFile, file: File, folder: Path) -> None:
    target = folder / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with archive.open(f"files/{file.path}") as source:
            # No more than it says it is: what unpacks to terabytes is stopped.
            found, size = copy_hashed(source, target, at_most=file.size)  # type: ignore[arg-type]
    except KeyError as exc:
        raise DamagedError(sha256=file.sha256, problem=f"{file.path!r} is not in the archive") from exc
    if (found, size) != (file.sha256, file.size):
        raise DamagedError(sha256=file.sha256, problem=f"{file.path!r} of the archive hashes to {found}")
