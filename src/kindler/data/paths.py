"""Where files are: what a user's path names, on this machine or behind a URI that Arrow knows.

Which of a folder's files are data is said by whoever reads them.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyarrow import fs

from kindler.errors import ConfigError

__all__ = ["Choice", "child_uri", "expand", "file_system", "hidden", "is_remote", "local_path"]

Choice: TypeAlias = Callable[[str, Sequence[tuple[str, ...]]], Callable[[tuple[str, ...]], bool]]
"""Given a folder and the paths inside it, in parts: which of its files are data; may refuse the folder."""


def expand(path: str, choice: Choice) -> list[str]:
    """The files that a path names: itself, what a pattern matches, or those of a folder that are chosen.

    Raises:
        ConfigError: There is nothing, or no file system for it.
    """
    if is_remote(path):
        system, place = file_system(path)
        return [child_uri(path, place, file) for file in _under(system, place, choice)]
    local = local_path(path)
    if not os.path.exists(local) and glob.has_magic(local):
        matches = [
            match for match in sorted(glob.glob(local, recursive=True)) if not hidden(Path(match).name)
        ]
        return [file for match in matches for file in _under(fs.LocalFileSystem(), match, choice)]
    return _under(fs.LocalFileSystem(), local, choice)


def file_system(file: str) -> tuple[fs.FileSystem, str]:
    """The file system that a path is of, and the path in it.

    Raises:
        ConfigError: Arrow knows no such file system.
    """
    if not is_remote(file):
        return fs.LocalFileSystem(), local_path(file)
    try:
        found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(file)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
        raise ConfigError(
            f"{file!r}: {exc}\nHint: a local path, or file:, s3:, gs:, hdfs: and the like."
        ) from exc
    return found


def is_remote(path: str) -> bool:
    """Whether it is not a path of this machine."""
    return "://" in path and urlsplit(path).scheme != "file"


def local_path(path: str) -> str:
    """A plain absolute path, also for file:/a, file:///a and their percent-encoded names."""
    if path.startswith("file:"):
        rest = path.removeprefix("file:")
        if rest.startswith("//"):  # file://host/a: the host is this one
            rest = "/" + rest[2:].partition("/")[2]
        return unquote(rest)
    return os.path.abspath(os.path.expanduser(path))


def child_uri(uri: str, path: str, child: str) -> str:
    """The URI of a file that was found under `uri`, whose own path is `path`; options stay."""
    address, mark, options = uri.partition("?")
    root = address.rstrip("/")
    prefix = root[: len(root) - len(path.rstrip("/"))]
    return f"{prefix}{child}{mark}{options}"


def hidden(name: str) -> bool:
    """Whether tools leave such a file or folder out: `_SUCCESS`, `.crc`."""
    return name.startswith(("_", "."))


def _under(system: fs.FileSystem, place: str, choice: Choice) -> list[str]:
    info = system.get_file_info(place)
    if info.type == fs.FileType.NotFound:
        raise ConfigError(f"{place!r} does not exist.")
    if info.type == fs.FileType.File:
        return [place]
    inside = system.get_file_info(fs.FileSelector(place, recursive=True))
    chosen = choice(place, [_below(place, entry.path) for entry in inside])
    files = [entry.path for entry in inside if entry.type == fs.FileType.File]
    return sorted(file for file in files if chosen(_below(place, file)))


def _below(folder: str, path: str) -> tuple[str, ...]:
    return tuple(path[len(folder) :].strip("/").split("/"))
