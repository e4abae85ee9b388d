"""Where TFRecord files are: paths, folders, globs and URIs; plain or compressed; renamed once whole."""

from __future__ import annotations

import contextlib
import gzip
import os
import posixpath
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

from pyarrow import fs

from kindler.data.paths import expand, file_system, hidden
from kindler.data.tfrecord.framing import HEAD, Readable, is_head
from kindler.errors import ConfigError

Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
Compression: TypeAlias = Literal["auto", "gzip"] | None

_GZIP_MAGIC = b"\x1f\x8b\x08"
_GZIP_LEVEL = 6  # zlib's own, as TensorFlow has it


def find(paths: Paths) -> list[str]:
    """The files behind paths, folders, globs and URIs, sorted within each.

    Folders are searched recursively. Names that start with "_" or "." are left out, and any other name is
    taken: TFRecord files often have no suffix.

    Raises:
        ConfigError: Nothing is there.
    """
    places = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files = [file for path in places for file in expand(os.fspath(path), _data_files)]
    if not files:
        raise ConfigError(f"no file in {[os.fspath(path) for path in places]}.")
    return files


@contextlib.contextmanager
def opened(file: str, compression: Compression = "auto") -> Iterator[Readable]:
    """A file's content, uncompressed."""
    check_reading(compression)
    system, path = file_system(file)
    with contextlib.ExitStack() as stack:
        raw: Any
        try:
            if isinstance(system, fs.LocalFileSystem):
                raw = stack.enter_context(open(path, "rb", buffering=0))
            else:
                raw = stack.enter_context(system.open_input_file(path))
        except FileNotFoundError:
            raise ConfigError(f"{file!r} does not exist.") from None
        if compression == "gzip" or (compression == "auto" and _is_gzip(raw)):
            raw = stack.enter_context(gzip.GzipFile(fileobj=raw, mode="rb"))
        yield raw


@contextlib.contextmanager
def written(file: str, compression: Compression) -> Iterator[Any]:
    """A new file to write to."""
    system, path = file_system(file)
    with contextlib.ExitStack() as stack:
        raw: Any
        if isinstance(system, fs.LocalFileSystem):
            raw = stack.enter_context(open(path, "wb"))
        else:
            raw = stack.enter_context(system.open_output_stream(path))
        if compression == "gzip":
            # Without a time in it, the same rows give the same file.
            raw = stack.enter_context(
                gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=_GZIP_LEVEL, mtime=0)
            )
        yield raw


def part_name(number: int, compression: Compression) -> str:
    """The name of one of several files."""
    _check(compression, ("gzip", None))
    return f"part-{number:05d}.tfrecord{'.gz' if compression else ''}"


def check_reading(compression: Any) -> None:
    """Refuse a compression that cannot be read.

    Raises:
        ConfigError: It is none of those known.
    """
    _check(compression, ("auto", "gzip", None))


def free(path: str, *, overwrite: bool) -> None:
    """Make sure that something may be written there.

    Raises:
        ConfigError: Something is there already.
    """
    system, place = file_system(path)
    if not overwrite and system.get_file_info(place).type != fs.FileType.NotFound:
        raise ConfigError(f"{path!r} already exists.\nHint: overwrite=True replaces it.")


class staged:
    """What is written under another name beside its place, and gets its own name when all went well.

    Nothing is left of it otherwise. On a file system without a rename (S3) the last step is a copy.

    Args:
        path: Its place.
        folder: Whether it is a folder.
        overwrite: Replace what is there.
    """

    def __init__(self, path: str, *, folder: bool, overwrite: bool) -> None:
        self.path, self.folder, self.overwrite = path.rstrip("/") or path, folder, overwrite
        parent, name = posixpath.split(self.path)
        self.beside = posixpath.join(parent, f".{name}.{uuid.uuid4().hex[:12]}.tmp")

    def __enter__(self) -> str:
        self.begin()
        return self.beside

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.discard()

    def begin(self) -> None:
        """Make room."""
        free(self.path, overwrite=self.overwrite)
        system, place = file_system(self.beside)
        system.create_dir(place if self.folder else posixpath.dirname(place) or ".", recursive=True)

    def commit(self) -> None:
        """Give it its name."""
        free(self.path, overwrite=self.overwrite)
        system, place = file_system(self.path)
        _, beside = file_system(self.beside)
        old = system.get_file_info(place)
        if old.type == fs.FileType.NotFound or (old.type == fs.FileType.File and not self.folder):
            system.move(beside, place)
            return
        aside = f"{beside}.old"
        system.move(place, aside)
        try:
            system.move(beside, place)
        except BaseException:
            system.move(aside, place)
            raise
        _delete(system, aside)

    def discard(self) -> None:
        """Leave nothing behind, if it is still there."""
        system, beside = file_system(self.beside)
        with contextlib.suppress(OSError):
            _delete(system, beside)


def _delete(system: fs.FileSystem, path: str) -> None:
    kind = system.get_file_info(path).type
    if kind == fs.FileType.Directory:
        system.delete_dir(path)
    elif kind == fs.FileType.File:
        system.delete_file(path)


def _check(compression: Any, allowed: tuple[str | None, ...]) -> None:
    if compression not in allowed:
        raise ConfigError(f"compression={compression!r}: must be one of {list(allowed)}.")


def _is_gzip(raw: Any) -> bool:
    start = raw.read(HEAD)
    raw.seek(0)
    # A record of 559,903 bytes starts with the same three bytes; its checksum tells.
    return bool(start.startswith(_GZIP_MAGIC)) and not is_head(start)


def _data_files(path: str, inside: Sequence[tuple[str, ...]]) -> Callable[[tuple[str, ...]], bool]:
    return lambda parts: not any(map(hidden, parts))
