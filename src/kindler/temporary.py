"""Private temporary folders, the removal of those whose process was killed, and replacing files whole.

Another user may create a name in a shared folder such as /tmp first, so an existing folder is used only if it
belongs to this user and nobody else can write to it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

from kindler.errors import ConfigError, naming_full_disk

_NAMES = 10
_NEW_NAME = re.compile(r".*[0-9a-f]{12}")  # of a `Folder`
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


def private_folder(parent: Path | None = None) -> Path:
    """The folder that all processes of this user share, in `parent` or the temporary directory."""
    parent = parent or Path(tempfile.gettempdir())
    name = f"kindler-{os.geteuid()}"
    for number in range(_NAMES):
        path = parent / (f"{name}-{number}" if number else name)
        if _is_mine(path):
            return path
    raise ConfigError(
        f"{parent / name} and its {_NAMES - 1} alternatives belong to, or can be changed by, another user.\n"
        "Hint: remove them, or set TMPDIR to a folder of your own."
    )


def _is_mine(path: Path) -> bool:
    """Create the folder if it does not exist; return whether nobody else can change it."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        return False
    if status.st_mode & 0o077:
        path.chmod(0o700)
    return True


class Folder:
    """A new, empty folder that nobody else can read; a context manager that removes it.

    A killed process cannot remove its folders. So each has a record, locked while its process lives, and
    `sweep` removes the folders of records that are not locked. Creating a folder sweeps first.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        self._process = os.getpid()
        self.path = (parent or Path(tempfile.gettempdir())).absolute() / f"{prefix}{secrets.token_hex(6)}"
        with naming_full_disk(self.path):
            sweep()
            self._make(_records())

    def _make(self, records: Path) -> None:
        with locked(records / ".lock"):
            self._record = records / secrets.token_hex(8)
            self._lock = os.open(self._record, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                os.write(self._lock, os.fsencode(self.path))
                self.path.mkdir(mode=0o700)
            except BaseException:
                self.remove()
                raise

    def remove(self) -> None:
        """Remove it and its content. Idempotent; no effect in a forked process."""
        if self._lock >= 0 and os.getpid() == self._process:
            _discard(self.path, self._record)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.remove()


def sweep() -> None:
    """Remove the folders of this user's killed processes."""
    records = _records()
    with locked(records / ".lock"):
        for record in records.iterdir():
            if record.name != ".lock":
                _sweep(record)


def _sweep(record: Path) -> None:
    try:
        handle = os.open(record, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # already removed
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # its process is alive
    else:
        path = Path(os.fsdecode(os.read(handle, 1 << 16)))
        if _NEW_NAME.fullmatch(path.name):
            _discard(path, record)
        else:
            record.unlink(missing_ok=True)  # killed before all of it was written, and the folder made
    finally:
        os.close(handle)


def _discard(folder: Path, record: Path) -> None:
    """Remove a folder and its record; if the disk refuses, the record stays for a later sweep."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        if not folder.exists():
            record.unlink(missing_ok=True)


def _records() -> Path:
    folder = private_folder() / "folders"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextmanager
def beside(path: str | PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary path for a new file or folder, which is moved to `path` if the block succeeds.

    An existing file is replaced; an existing folder only with `overwrite`, else it raises ConfigError.
    """
    target = Path(path).absolute()
    if target.is_dir() and not overwrite:
        raise ConfigError(f"{target} is an existing folder, which is not overwritten.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with naming_full_disk(target), Folder(f".{target.name}-", target.parent) as folder:
        unfinished = folder / target.name  # frameworks go by the suffix
        yield unfinished
        if overwrite and target.is_dir():
            if _exchanged(unfinished, target):
                return  # what was there goes with the temporary folder
            shutil.rmtree(target)
        os.replace(unfinished, target)


def _exchanged(one: Path, other: Path) -> bool:
    """Whether two files or folders could change places at once; some file systems cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and not rename(_HERE, bytes(one), _HERE, bytes(other), _EXCHANGE)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file; other processes and threads wait for it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
