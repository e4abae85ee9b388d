"""Blobs: immutable bytes named by their SHA-256, in files or in memory. Object stores are in `objects.py`.

Whether anything still needs a blob is for the catalog to say.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from kindler.errors import ConfigError, DamagedError, MissingExtraError, StoreError
from kindler.store.files import check_whole, sha256_of, staging_folder, user_folder
from kindler.store.urls import folder_of

_CHUNK_BYTES = 1 << 20


class Blobs(Protocol):
    """Bytes by their hash.

    Any number of processes may write the same blob at once: whoever sees it sees all of it.

    Attributes:
        url: Where they are; another process opens them with it.
        stage: Where files are best prepared; on the blobs' own disk where they are files.
    """

    url: str
    stage: Path

    def put(self, source: Path, sha256: str) -> None:
        """Keep the file's bytes under that hash; the file itself may be taken over and is not changed."""

    def get(self, sha256: str, target: Path, *, private: bool = False) -> None:
        """Make `target` a file of those bytes, which were checked. Only a private one may be written to.

        Raises:
            DamagedError: The blob is gone, or is not what its name says.
        """

    def has(self, sha256: str) -> bool:
        """Whether the blob is there."""

    def old(self, grace_s: float) -> Iterator[str]:
        """All blobs that were last put more than `grace_s` seconds ago."""

    def remove(self, hashes: Iterable[str]) -> None:
        """Remove blobs; those that are gone already are fine."""


def open_blobs(url: str) -> Blobs:
    """The blobs at a file://, s3://, gs://, az:// or memory:// URL.

    Raises:
        ConfigError: It is another one.
        MissingExtraError: What it needs is not installed.
    """
    scheme = url.partition("://")[0]
    if scheme == "file":
        return FileBlobs(folder_of(url))
    if scheme == "memory":
        return MemoryBlobs(user_folder())
    if scheme in ("s3", "gs", "az"):
        try:
            from kindler.store.objects import ObjectBlobs
        except ModuleNotFoundError as exc:
            if exc.name != "obstore":
                raise
            raise MissingExtraError(what=f"a store at {scheme}://", package="obstore", extra="s3") from exc
        return ObjectBlobs(url, user_folder())
    raise ConfigError(
        f"unknown blob scheme {scheme}://.\nHint: use file://, s3://, gs://, az:// or memory://."
    )


class FileBlobs:
    """Blobs in files of a folder: blobs/ab/abcdef..., never written in place."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file://{quote(str(folder))}"
        self.stage = folder / "staging"
        self._folder = folder / "blobs"

    def put(self, source: Path, sha256: str) -> None:
        target = self._path(sha256)
        exists = target.exists()
        if exists and _is_whole(target, sha256) and _touched(target):
            return
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _sync(source)
            source.chmod(0o444)
            if exists or not _linked(source, target):
                self._copy(source, target)
            _sync(target.parent)
        except PermissionError as exc:
            raise StoreError(f"cannot write to the store at {self._folder}: {exc}.") from exc

    def _copy(self, source: Path, target: Path) -> None:
        """Beside, then renamed: over a damaged blob, one of somebody else, or from another disk."""
        with staging_folder(self.stage) as folder:
            copy = folder / target.name
            shutil.copyfile(source, copy)
            _sync(copy)
            copy.chmod(0o444)
            os.replace(copy, target)

    def get(self, sha256: str, target: Path, *, private: bool = False) -> None:
        blob = self._path(sha256)
        if not blob.exists():
            raise DamagedError(sha256=sha256, problem="it is missing")
        check_whole(blob, sha256)
        if not private:
            with suppress(OSError):
                os.link(blob, target)
                return
        with blob.open("rb") as source, target.open("xb") as copy:  # never into a file that is there
            shutil.copyfileobj(source, copy, _CHUNK_BYTES)

    def has(self, sha256: str) -> bool:
        return self._path(sha256).exists()

    def old(self, grace_s: float) -> Iterator[str]:
        limit = time.time() - grace_s
        for path in sorted(self._folder.glob("??/*")):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime <= limit:
                    yield path.name

    def remove(self, hashes: Iterable[str]) -> None:
        for sha256 in hashes:
            self._path(sha256).unlink(missing_ok=True)

    def _path(self, sha256: str) -> Path:
        return self._folder / sha256[:2] / sha256


class MemoryBlobs:
    """Blobs in this process, for tests and trials."""

    def __init__(self, stage: Path) -> None:
        self.url = "memory://"
        self.stage = stage
        self._blobs: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def put(self, source: Path, sha256: str) -> None:
        with self._lock:
            self._blobs[sha256] = (source.read_bytes(), time.time())

    def get(self, sha256: str, target: Path, *, private: bool = False) -> None:
        blob = self._blobs.get(sha256)
        if blob is None:
            raise DamagedError(sha256=sha256, problem="it is missing")
        target.write_bytes(blob[0])
        check_whole(target, sha256)

    def has(self, sha256: str) -> bool:
        return sha256 in self._blobs

    def old(self, grace_s: float) -> Iterator[str]:
        limit = time.time() - grace_s
        with self._lock:
            expired = [sha256 for sha256, (_, when) in self._blobs.items() if when <= limit]
        return iter(expired)

    def remove(self, hashes: Iterable[str]) -> None:
        with self._lock:
            for sha256 in hashes:
                self._blobs.pop(sha256, None)


def _is_whole(path: Path, sha256: str) -> bool:
    """Whether the bytes are those of the name; a damaged blob is healed by whoever puts it again."""
    try:
        return sha256_of(path) == sha256
    except OSError:
        return False


def _touched(path: Path) -> bool:
    """Let the blob count as put now, so that no sweep takes it for debris; False if that is not possible."""
    try:
        os.utime(path)
    except (FileNotFoundError, PermissionError):
        return False
    return True


def _linked(source: Path, target: Path) -> bool:
    """Whether the file could be taken over without a copy."""
    try:
        os.link(source, target)
    except FileExistsError:
        pass  # another process has put the same just now
    except OSError:
        return False  # another disk, or one without links
    return True


def _sync(path: Path) -> None:
    """On the disk, not only on its way there: a row must never outlive its bytes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
