"""Folders of files, on local disk or at any fsspec URL, and atomic writes: complete or absent."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from kindler.errors import MissingExtraError, naming_full_disk

_UNFINISHED = ".part"


def place(folder: str | PathLike[str]) -> str:
    """A URL as it is, or an absolute path."""
    name = os.fspath(folder)
    if name.startswith("file://"):
        name = name.removeprefix("file://")
    return name if "://" in name else str(Path(name).absolute())


def split(path: str | PathLike[str]) -> tuple[str, str]:
    whole = place(path)
    folder, _, name = whole.rpartition("/")
    return (folder or "/", name)


def folder_at(folder: str | PathLike[str]) -> Folder:
    """The folder at a path or URL; a URL raises MissingExtraError without fsspec."""
    name = place(folder)
    return _RemoteFolder(name) if "://" in name else Folder(Path(name))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk, where the file system can tell."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Create a folder, with those it lies in, whose names are then on the disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


class Folder:
    """The files of a folder, which the first write creates: on local disk, or elsewhere in a subclass."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        """The names of its files, sorted."""
        try:
            return sorted(entry.name for entry in self._folder.iterdir() if entry.is_file())
        except FileNotFoundError:
            return []

    def read(self, name: str, limit: int | None = None) -> bytes:
        """A file's content, or its first `limit` bytes."""
        with (self._folder / name).open("rb") as file:
            return file.read(-1 if limit is None else limit)

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a file, atomically; on return it outlasts a loss of power."""
        path = self._folder / name
        with naming_full_disk(path, sum(memoryview(piece).nbytes for piece in pieces)):
            make_folder(self._folder)
            handle, unfinished = tempfile.mkstemp(dir=self._folder, prefix=f".{name}-", suffix=_UNFINISHED)
            try:
                with os.fdopen(handle, "wb") as file:
                    for piece in pieces:
                        file.write(piece)
                    file.flush()
                    os.fsync(file.fileno())
                os.chmod(unfinished, 0o644)
                os.replace(unfinished, path)
            except BaseException:
                with suppress(OSError):  # `sweep` removes it
                    os.unlink(unfinished)
                raise
            sync(self._folder)

    def modified(self, name: str) -> float:
        """The time of a file's last write in seconds; 0 if the file system does not tell."""
        return (self._folder / name).stat().st_mtime

    def remove(self, name: str) -> None:
        """Delete a file, if it exists."""
        (self._folder / name).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Delete the remains of interrupted writes."""
        for name in self.names():
            if name.startswith(".") and name.endswith(_UNFINISHED):
                self.remove(name)

    def path(self, name: str) -> str:
        """The path or URL of a file."""
        return str(self._folder / name)


class _RemoteFolder(Folder):
    """Object stores show a file once it is complete; elsewhere readers must check a hash."""

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
            entries = self._files.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rpartition("/")[2] for entry in entries if entry["type"] == "file")

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
            pass

    def sweep(self) -> None:
        """Interrupted writes leave nothing."""

    def path(self, name: str) -> str:
        return f"{self._url}/{name}"
