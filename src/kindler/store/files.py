"""Files on this machine: their hashes, and the folders in which they are prepared.

A killed process may leave such a folder behind. Each has a lock beside it, held as long as its process lives.
The lock, not the age, says whether a folder is debris: a writer that takes a day is left alone, and one that
was killed a second ago is not.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from kindler.errors import DamagedError, StoreError

_LOCK = ".lock"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CHUNK_BYTES = 1 << 20


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(_CHUNK_BYTES)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def copy_hashed(source: BinaryIO, target: Path, *, at_most: int | None = None) -> tuple[str, int]:
    """Write what can be read to a new file; returns its hash and its size.

    It stops one chunk after `at_most` bytes: the size then says that there were more.
    """
    digest, size = hashlib.sha256(), 0
    with target.open("xb") as file:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
            size += len(chunk)
            if at_most is not None and size > at_most:
                break
    return digest.hexdigest(), size


def check_whole(path: Path, sha256: str) -> None:
    """Raise DamagedError unless the file has this hash."""
    actual = sha256_of(path)
    if actual != sha256:
        raise DamagedError(sha256=sha256, problem=f"its bytes hash to {actual}")


def user_folder() -> Path:
    """Where to work when the blobs are not on this machine; nobody else may change files there."""
    folder = Path(tempfile.gettempdir()) / f"kindler-store-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise StoreError(f"{folder} is not a private folder of this user.\nHint: remove it, or set TMPDIR.")
    return folder


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full or failing disk into a StoreError that names the folder."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            problem = f"there is no space left on the disk of {folder}: {exc}."
            hint = "free some space; store.sweep() removes unreferenced blobs."
        elif exc.errno in (errno.EIO, errno.EROFS):
            problem, hint = (
                f"the disk of {folder} failed: {exc}.",
                "see the system's log, and try again.",
            )
        else:
            raise
        raise StoreError(f"{problem}\nHint: {hint}") from exc


@contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """A new, empty folder, gone after the block; see `disk_errors`, whatever was written in it."""
    with disk_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        path, lock = _locked(parent)
        try:
            path.mkdir()
            yield path
        finally:
            _discard(path)
            os.close(lock)


def sweep_staging(parent: Path) -> int:
    """Remove the folders whose processes are gone; returns how many."""
    removed = 0
    for lock in sorted(parent.glob(f"*{_LOCK}")):
        try:
            handle = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue  # gone, or of somebody who lets nobody else look
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its process lives
        else:
            removed += _discard(lock.with_suffix(""))
        finally:
            os.close(handle)
    return removed


def _discard(path: Path) -> bool:
    """Remove a folder and its lock; if the disk refuses, the lock stays for a later sweep."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        if not path.exists():
            path.with_suffix(_LOCK).unlink(missing_ok=True)
            return True
    return False


def _locked(parent: Path) -> tuple[Path, int]:
    while True:
        path = parent / uuid.uuid4().hex
        lock = path.with_suffix(_LOCK)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # A sweep may have come between the two lines and taken the lock file away.
        if lock.exists():
            return path, handle
        os.close(handle)
