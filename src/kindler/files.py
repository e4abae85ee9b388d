"""Folders that checkpoints lie in: on this machine's disk, or behind any URL that fsspec knows.

A file appears whole or not at all. What is in the files is not known here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from kindler.errors import ConfigError, MissingExtraError, naming_full_disk

__all__ = ["Folder", "beside", "folder_at", "place", "split", "write_file"]

_UNFINISHED = ".part"


class Folder(Protocol):
    """What is done with the files of a folder; it need not exist before something is written."""

    def names(self) -> list[str]:
        """The files there are."""

    def read(self, name: str, limit: int | None = None) -> bytes:
        """A file's content, or its first `limit` bytes."""

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Put a file there, whole or not at all."""

    def modified(self, name: str) -> float:
        """When a file was written, as seconds; 0 where the store does not say."""

    def remove(self, name: str) -> None:
        """Take a file away, if it is there."""

    def sweep(self) -> None:
        """Take away what interrupted writes have left."""

    def path(self, name: str) -> str:
        """How a user would name the file."""


def place(folder: str | PathLike[str]) -> str:
    """A folder's name as all processes understand it: a URL, or an absolute path."""
    name = os.fspath(folder)
    if name.startswith("file://"):
        name = name.removeprefix("file://")
    return name if "://" in name else str(Path(name).absolute())


def split(path: str | PathLike[str]) -> tuple[str, str]:
    """A file's folder and its name in it."""
    whole = place(path)
    folder, _, name = whole.rpartition("/")
    return (folder or "/", name)


def folder_at(folder: str | PathLike[str]) -> Folder:
    """The folder of that name.

    Raises:
        MissingExtraError: It is a URL, and fsspec is not installed.
    """
    name = place(folder)
    return _Remote(name) if "://" in name else _Local(Path(name))


@contextmanager
def beside(path: str | PathLike[str]) -> Iterator[Path]:
    """A name for a file or folder to be written; it gets its real name once the block has ended well.

    Raises:
        ConfigError: A folder of that name exists already.
    """
    target = Path(path).absolute()
    if target.is_dir():
        raise ConfigError(f"{target} is an existing folder, which is not overwritten.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        unfinished = Path(folder) / target.name  # frameworks go by the suffix
        with naming_full_disk(target):
            yield unfinished
        os.replace(unfinished, target)


def write_file(path: Path, data: bytes) -> None:
    """Put `data` at `path`, whole or not at all."""
    _write(path, [data])


class _Local:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in self._folder.iterdir() if entry.is_file())
        except FileNotFoundError:
            return []

    def read(self, name: str, limit: int | None = None) -> bytes:
        with (self._folder / name).open("rb") as file:
            return file.read(-1 if limit is None else limit)

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        _write(self._folder / name, pieces)

    def modified(self, name: str) -> float:
        return (self._folder / name).stat().st_mtime

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def sweep(self) -> None:
        for name in self.names():
            if name.startswith(".") and name.endswith(_UNFINISHED):
                self.remove(name)

    def path(self, name: str) -> str:
        return str(self._folder / name)


class _Remote:
    """Behind a URL. Object stores show a file once it is whole; where a store does not, its hash tells."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ModuleNotFoundError as exc:
            raise MissingExtraError(what=f"the folder {url}", package="fsspec", extra="remote") from exc
        self._url = url.rstrip("/")
        self._files: Any
        self._files, self._root = url_to_fs(self._url)

    def names(self) -> list[str]:
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rpartition("/")[2] for entry in found if entry["type"] == "file")

    def read(self, name: str, limit: int | None = None) -> bytes:
        data: bytes = self._files.cat_file(f"{self._root}/{name}", start=0, end=limit)
        return data

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        self._files.makedirs(self._root, exist_ok=True)
        self._files.pipe_file(f"{self._root}/{name}", b"".join(pieces))

    def modified(self, name: str) -> float:
        try:
            return float(self._files.modified(f"{self._root}/{name}").timestamp())
        except NotImplementedError:
            return 0.0

    def remove(self, name: str) -> None:
        try:
            self._files.rm_file(f"{self._root}/{name}")
        except FileNotFoundError:
            pass  # that is what was wanted

    def sweep(self) -> None:
        """Nothing is left of an interrupted put."""

    def path(self, name: str) -> str:
        return f"{self._url}/{name}"


def _write(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    size = sum(memoryview(piece).nbytes for piece in pieces)
    with naming_full_disk(path, size):
        _write_pieces(path, pieces)


def _write_pieces(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=_UNFINISHED)
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, 0o644)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
