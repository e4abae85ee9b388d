"""Resolves user paths: local ones, and URIs that Arrow or fsspec knows."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyarrow import fs

from kindler.errors import ConfigError

Choice: TypeAlias = Callable[[str, Sequence[tuple[str, ...]]], Callable[[tuple[str, ...]], bool]]
"""Given a folder and the paths inside it, in parts: which of its files are data; may refuse the folder."""


def expand(path: str, choice: Choice) -> list[str]:
    """Itself, glob matches, or the chosen files of a folder; raises ConfigError if there is nothing."""
    system, place = file_system(path)
    # No "?" behind a URL, where the options of a URI start with it.
    matches = _matches(system, place, r"[*\[]" if is_remote(path) else r"[*?\[]")
    files = [file for match in matches for file in _under(system, match, choice)]
    return [child_uri(path, place, file) for file in files] if is_remote(path) else files


def file_system(file: str) -> tuple[fs.FileSystem, str]:
    if not is_remote(file):
        return fs.LocalFileSystem(), local_path(file)
    try:
        resolved: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(file)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
        other = _of_fsspec(file)
        if other is None:
            raise ConfigError(
                f"{file!r}: {exc}\nHint: a local path, or file:, s3:, gs:, hdfs: and the like; with"
                " pip install 'kindler[remote]' also every fsspec scheme."
            ) from exc
        return other
    return resolved


def is_remote(path: str) -> bool:
    return "://" in path and urlsplit(path).scheme != "file"


def local_path(path: str) -> str:
    if path.startswith("file:"):
        rest = path.removeprefix("file:")
        if rest.startswith("//"):  # file://host/a: the host is this one
            rest = "/" + rest[2:].partition("/")[2]
        return unquote(rest)
    return os.path.abspath(os.path.expanduser(path))


def absolute(path: str | os.PathLike[str]) -> str:
    given = os.fspath(path)
    return given if is_remote(given) else local_path(given)


def child_uri(uri: str, path: str, child: str) -> str:
    address, mark, options = uri.partition("?")
    root = address.rstrip("/")
    prefix = root[: len(root) - len(path.rstrip("/"))]
    return f"{prefix}{child}{mark}{options}"


def hidden(name: str) -> bool:
    """Names that tools skip, such as `_SUCCESS` and `.crc`."""
    return name.startswith(("_", "."))


def every_file(path: str, inside: Sequence[tuple[str, ...]]) -> Callable[[tuple[str, ...]], bool]:
    return lambda parts: not any(map(hidden, parts))


def _of_fsspec(file: str) -> tuple[fs.FileSystem, str] | None:
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError:
        return None
    try:
        system, place = url_to_fs(file)
    except (ValueError, ImportError):  # no such protocol, or the package behind it is missing
        return None
    return fs.PyFileSystem(fs.FSSpecHandler(system)), place


def _matches(system: fs.FileSystem, place: str, wild: str) -> list[str]:
    """The path itself, or those that it matches if it is a glob; `**` is any number of folders."""
    names = place.split("/")
    first = next((i for i, name in enumerate(names) if re.search(wild, name)), None)
    if first is None or system.get_file_info(place).type != fs.FileType.NotFound:
        return [place]
    found, below = [fs.FileInfo("/".join(names[:first]) or "/", fs.FileType.Directory)], False
    for name in names[first:]:
        if name == "**":
            below = True
            continue
        folders = [entry.path for entry in found if entry.type == fs.FileType.Directory]
        selectors = [fs.FileSelector(folder, recursive=below, allow_not_found=True) for folder in folders]
        inside = [entry for selector in selectors for entry in system.get_file_info(selector)]
        found, below = [entry for entry in inside if fnmatchcase(entry.base_name, name)], False
    return sorted({entry.path for entry in found if not hidden(entry.base_name)})


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
