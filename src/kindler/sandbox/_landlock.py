"""Landlock: the kernel's own list of the folders that a process, and what it starts, may read. Linux 5.13 on.

A list can only be made shorter, never longer again, and needs no privilege. It holds for the calling thread
and for the threads it starts later.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same on every machine
_ASK_VERSION = 1
_PATH_RULE = 1

_WRITE_FILE, _READ_FILE, _READ_DIR, _IOCTL = 1 << 1, 1 << 2, 1 << 3, 1 << 15
_FILES = _WRITE_FILE | _READ_FILE | _IOCTL | 1 | 1 << 14  # what can be allowed for a file
# All rights over files that a version of Landlock knows, by version.
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP = 0b11  # bind and connect, from version 4 on
_SCOPES = 0b11  # abstract sockets and signals of processes outside, from version 6 on


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """The version of Landlock that this kernel has; 0 if it has none, or does not let this process use it."""
    try:
        return max(0, _call(_CREATE, None, 0, _ASK_VERSION))
    except OSError:
        return 0


def confine(readable: Iterable[Path], *, writable: Sequence[Path] = (), devices: Sequence[Path] = ()) -> None:
    """Let this thread open nothing but what is here or below it, from now on: to read, to write as well, and
    devices to control. What does not exist is passed over."""
    known = version()
    if not known:
        raise OSError(errno.ENOSYS, "this kernel has no Landlock")
    rights = _RIGHTS[min(known, max(_RIGHTS))]
    wanted = _Ruleset(rights, _TCP if known >= 4 else 0, _SCOPES if known >= 6 else 0)
    size = 8 if known < 4 else 16 if known < 6 else 24
    ruleset = _call(_CREATE, ctypes.byref(wanted), size, 0)
    try:
        for paths, allowed in (
            (readable, _READ_FILE | _READ_DIR),
            (writable, _READ_FILE | _WRITE_FILE),
            (devices, _READ_FILE | _READ_DIR | _WRITE_FILE | _IOCTL),
        ):
            for path in paths:
                _allow(ruleset, path, allowed & rights)
        _call(_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, allowed: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        rule = _PathBeneath(allowed if path.is_dir() else allowed & _FILES, handle)
        _call(_ADD, ruleset, _PATH_RULE, ctypes.byref(rule), 0)
    finally:
        os.close(handle)


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
