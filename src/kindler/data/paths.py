"""Resolves user paths: local ones, and URIs that Arrow or fsspec knows."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyarrow import fs

from kindler.errors import ConfigError

Choice: TypeAlias = Callable[[str, Sequence[tuple[str, ...]]], Callable[[tuple[str, ...]], bool]]
"""Given a folder and the paths inside it, in parts: which of its files are data; may refuse the folder."""


def expand(path: str, choice: Choice) -> list[str]:
    """Itself, glob matches, or the chosen files of a folder; raises ConfigError if there is nothing."""
    if is_remote(path):
        system, place = file_system(path)
        files = [file for match in _remote_matches(system, place) for file in _under(system, match, choice)]
        return [child_uri(path, place, file) for file in files]
    local = local_path(path)
    if not os.path.exists(local) and glob.has_magic(local):
        matches = [
            match for match in sorted(glob.glob(local, recursive=True)) if not hidden(Path(match).name)
        ]
        return [file for match in matches for file in _under(fs.LocalFileSystem(), match, choice)]
    return _under(fs.LocalFileSystem(), local, choice)


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


def _remote_matches(system: fs.FileSystem, place: str) -> list[str]:
    magic = re.search(r"[*\[]", place)  # no "?", with which the options of a URI start
    if magic is None or system.get_file_info(place).type != fs.FileType.NotFound:
        return [place]
    base = place[: magic.start()].rpartition("/")[0]
    inside = system.get_file_info(fs.FileSelector(base, recursive=True, allow_not_found=True))
    wanted = re.compile(_pattern(place))
    paths = [entry.path for entry in inside if wanted.fullmatch(entry.path)]
    return sorted(path for path in paths if not hidden(path.rpartition("/")[2]))


def _pattern(text: str) -> str:
    """A glob as a regular expression.

    >>> _pattern("b/*.csv"), _pattern("b/**/x[ab]")
    ('b/[^/]*\\\\.csv', 'b/(?:.*/)?x[ab]')
    """
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\[[^\]]+\])", text)
    # Every second piece is a wildcard; the ones between are plain text.
    plain, wild = pieces[::2], pieces[1::2]
    translated = [known.get(piece) or piece.replace("[!", "[^") for piece in wild]
    return "".join(a + b for a, b in zip(map(re.escape, plain), [*translated, ""], strict=True))


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
