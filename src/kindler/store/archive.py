"""One version as one file: a zip of its files and its catalog record, with hashes. Executes nothing.

kindler.json     format, name, shelf, kind, meta, attributes, and path, SHA-256 and size of each file
files/PATH       the files
"""

from __future__ import annotations

import json
import lzma
import zipfile
import zlib
from pathlib import Path

from kindler.errors import ConfigError, DamagedError
from kindler.store.files import copy_hashed
from kindler.store.versions import Address, File, Version, as_json
from kindler.temporary import beside

_FORMAT = 1
_RECORD = "kindler.json"
_RECORD_BYTES = 16 << 20
_FIELDS = {"name": str, "shelf": str, "kind": str, "meta": dict, "attributes": dict}
# `write` does not compress; a foreign archive may unpack to this many times its size.
_RATIO, _UNPACKED_BYTES = 100, 64 << 20
# Raised while reading foreign zips, which may be truncated, encrypted or compressed in an unknown way.
_MALFORMED = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError),
    *(
        ValueError,
        TypeError,
        KeyError,
        RuntimeError,
    ),  # RecursionError and NotImplementedError are of the last
)


def write(version: Version, folder: Path, path: Path) -> None:
    """Write a version, whose files are in a folder, to a file, which appears once it is complete."""
    record = {key: getattr(version, key) for key in _FIELDS}
    record |= {"format": _FORMAT, "files": [[file.path, file.sha256, file.size] for file in version.files]}
    with beside(path) as unfinished, zipfile.ZipFile(unfinished, "w") as archive:
        archive.writestr(_RECORD, as_json(record))
        for file in version.files:
            archive.write(folder / file.path, f"files/{file.path}")


def extract(path: Path, folder: Path) -> Version:
    """The version of an archive, without a number; its files are verified, in an empty folder."""
    try:
        with zipfile.ZipFile(path) as archive:
            record = _record(archive, path)
            for file in record.files:
                _extract(archive, file, folder)
            return record
    except (ConfigError, DamagedError):
        raise
    except _MALFORMED as exc:
        reason = f"{type(exc).__name__}: {exc}"
        raise ConfigError(f"{path} is not a complete store archive: {reason}.") from exc


def _record(archive: zipfile.ZipFile, path: Path) -> Version:
    entry = archive.getinfo(_RECORD)
    if entry.file_size > _RECORD_BYTES:
        raise ConfigError(f"{path} is not a store archive: its {_RECORD} is too large.")
    record = json.loads(archive.read(entry))
    if record["format"] != _FORMAT:
        raise ConfigError(
            f"{path} has the format {record['format']!r}; this version of Kindler reads {_FORMAT}."
        )
    files = [File(str(name), str(sha256), int(size)) for name, sha256, size in record["files"]]
    fields = {key: record[key] for key in _FIELDS}
    for key, kind in _FIELDS.items():
        if not isinstance(fields[key], kind):
            raise ConfigError(f"{path} is not a store archive: its {key} is {fields[key]!r}.")
    address = Address("default", fields.pop("shelf"), fields.pop("name"))
    version = Version.draft(address, files=files, **fields)
    at_most = _RATIO * path.stat().st_size + _UNPACKED_BYTES
    if version.size > at_most:
        raise ConfigError(f"{path} unpacks to {version.size} bytes; at most {at_most} are allowed.")
    return version


def _extract(archive: zipfile.ZipFile, file: File, folder: Path) -> None:
    target = folder / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with archive.open(f"files/{file.path}") as source:
            # No more than the recorded size: a zip bomb is stopped.
            sha256, size = copy_hashed(source, target, at_most=file.size)  # type: ignore[arg-type]
    except KeyError as exc:
        raise DamagedError(sha256=file.sha256, problem=f"{file.path!r} is not in the archive") from exc
    if (sha256, size) != (file.sha256, file.size):
        raise DamagedError(sha256=file.sha256, problem=f"{file.path!r} of the archive hashes to {sha256}")
