"""Seccomp: the kernel refuses every system call of a process that is not on a list.

The list is a small program that the kernel runs before each call; see `system_calls.py` for what is on it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable
from typing import TypeAlias

from kindler.jail.system_calls import ALLOWED, CHECKED, MACHINES, REFUSED

Step: TypeAlias = tuple[int, int, int, int]  # operation, jump if true, jump if false, value

_SET_SECCOMP, _FILTER, _NO_NEW_PRIVILEGES = 22, 2, 38
_LOAD, _EQUAL, _AND, _AT_LEAST, _RETURN = 0x20, 0x15, 0x54, 0x35, 0x06
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16  # where they lie in what the kernel looks at
_ALLOW = 0x7FFF0000
_X32 = 0x40000000  # begins the numbers of another list of calls on x86-64

_THREAD = 0x00010000  # clone: a thread of this process, and not a process
_PRCTL = (3, 15, 16, 23, 29, 30, 0x53564D41)  # names of threads, timer slack, names of memory, what it may do
# fcntl: copies, flags and locks of descriptors, sizes of pipes. Not whom the kernel signals, nor leases.
_FCNTL = (*range(8), 36, 37, 38, 1030, 1032, 1034)
# ioctl: whether it is a terminal and how wide, what can be read, not to wait, not to be inherited. Others let
# a process signal others (FIOSETOWN, SIOCSPGRP, TIOCSIG), type into a terminal, or change its files.
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)
_IOCTL_TYPE, _NVIDIA_TYPES = 0xFF00, (0x4600, 0x0000)  # of the driver, and of its memory
# mmap: memory that no limit counts, as it is shared (with nobody), or could be a stack.
_SHARED_ANONYMOUS, _GROWS_DOWN = 0x21, 0x100


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


class _Step(ctypes.Structure):
    _fields_ = (
        ("operation", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("value", ctypes.c_uint32),
    )


def is_known_machine() -> bool:
    """Whether the numbers of this machine's system calls are known."""
    return os.uname().machine in MACHINES and ctypes.sizeof(ctypes.c_void_p) == 8


def refuse_other_calls(*, gpu: bool = False) -> None:
    """From now on this process makes no system call that is not on the list, nor gains privileges.

    Args:
        gpu: Whether it may control the devices of NVIDIA's driver.

    Raises:
        OSError: The kernel refused.
    """
    column, machine = MACHINES[os.uname().machine]
    steps = list(_program(column, machine, os.getpid(), gpu=gpu))
    block = (_Step * len(steps))(*(_Step(*step) for step in steps))
    program = _Program(len(steps), ctypes.cast(block, ctypes.c_void_p))
    _prctl(_NO_NEW_PRIVILEGES, 1)
    _prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program))


def _prctl(option: int, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    rest = [0] * (4 - len(arguments))
    if libc.prctl(option, *(ctypes.c_ulong(a) if isinstance(a, int) else a for a in (*arguments, *rest))):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _program(column: int, machine: int, pid: int, *, gpu: bool) -> Iterable[Step]:
    yield _LOAD, 0, 0, _MACHINE
    yield _EQUAL, 1, 0, machine
    yield _refuse(errno.EPERM)
    yield _LOAD, 0, 0, _NUMBER
    if column == 0:
        yield _AT_LEAST, 0, 1, _X32
        yield _refuse(errno.EPERM)
    for numbers in ALLOWED.values():
        if (number := numbers[column]) is not None:
            yield _EQUAL, 0, 1, number
            yield _RETURN, 0, 0, _ALLOW
    nvidia = [_argument(1), (_AND, 0, 0, _IOCTL_TYPE), *_allowed(_NVIDIA_TYPES)] if gpu else []
    # The driver of a GPU shares memory with its device; what that takes is watched from outside.
    shared = [] if gpu else _without(3, _SHARED_ANONYMOUS)
    rules = {
        "clone": _if_bit(0, _THREAD),
        "tgkill": _if_one_of(0, (pid,)),
        "kill": _if_one_of(0, (pid,)),
        "prctl": _if_one_of(0, _PRCTL),
        # To ask only, and of itself.
        "prlimit64": [*_loads_zero(2), *_loads_zero(2, high=True), *_if_one_of(0, (0, pid))],
        "sched_setaffinity": _if_one_of(0, (0, pid)),
        "fcntl": _if_one_of(1, _FCNTL),
        "ioctl": [*nvidia, *_if_one_of(1, _IOCTL)],
        "mmap": [*_without(3, _GROWS_DOWN), *shared, (_RETURN, 0, 0, _ALLOW)],
    }
    for name, numbers in CHECKED.items():
        yield from _on(numbers[column], rules[name])
    for name, numbers in REFUSED.items():
        yield from _on(numbers[column], [_refuse(errno.ENOSYS if name == "clone3" else errno.EACCES)])
    yield _refuse(errno.EPERM)


def _on(number: int | None, steps: list[Step]) -> Iterable[Step]:
    """Steps for one call; every way through them ends in a return."""
    if number is not None:
        yield _EQUAL, 0, len(steps), number
        yield from steps


def _refuse(code: int) -> Step:
    return _RETURN, 0, 0, 0x00050000 | code


def _argument(index: int, *, high: bool = False) -> Step:
    return _LOAD, 0, 0, _ARGUMENTS + 8 * index + 4 * high


def _if_bit(index: int, bit: int) -> list[Step]:
    allow, refuse = (_RETURN, 0, 0, _ALLOW), _refuse(errno.EPERM)
    return [_argument(index), (_AND, 0, 0, bit), (_EQUAL, 0, 1, bit), allow, refuse]


def _if_one_of(index: int, values: Iterable[int]) -> list[Step]:
    return [_argument(index), *_allowed(values), _refuse(errno.EPERM)]


def _allowed(values: Iterable[int]) -> list[Step]:
    """Allow what was loaded if it is one of these; else go on."""
    return [step for value in values for step in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW))]


def _without(index: int, bits: int) -> list[Step]:
    """Go on only if an argument does not have all these bits."""
    return [_argument(index), (_AND, 0, 0, bits), (_EQUAL, 0, 1, bits), _refuse(errno.EPERM)]


def _loads_zero(index: int, *, high: bool = False) -> list[Step]:
    """Go on only if a half of an argument is zero."""
    return [_argument(index, high=high), (_EQUAL, 1, 0, 0), _refuse(errno.EPERM)]
