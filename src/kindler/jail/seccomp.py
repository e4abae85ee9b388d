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

__all__ = ["is_known_machine", "refuse_other_calls"]

Step: TypeAlias = tuple[int, int, int, int]  # operation, jump if true, jump if false, value

_SET_SECCOMP, _FILTER, _NO_NEW_PRIVILEGES = 22, 2, 38
_LOAD, _EQUAL, _AND, _AT_LEAST, _RETURN = 0x20, 0x15, 0x54, 0x35, 0x06
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16  # where they lie in what the kernel looks at
_ALLOW = 0x7FFF0000
_X32 = 0x40000000  # begins the numbers of another list of calls on x86-64

_THREAD = 0x00010000  # clone: a thread of this process, and not a process
_PRCTL = (3, 15, 16, 23, 29, 30, 0x53564D41)  # names of threads, timer slack, names of memory, what it may do
_OWNER_OF_SIGNALS = (8, 10, 15)  # fcntl: whom the kernel signals
_TERMINAL_INPUT = (0x5412, 0x541C)  # ioctl: typing into a terminal


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


def refuse_other_calls() -> None:
    """From now on this process makes no system call that is not on the list, nor gains privileges.

    Raises:
        OSError: The kernel refused.
    """
    column, machine = MACHINES[os.uname().machine]
    steps = list(_program(column, machine, os.getpid()))
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


def _program(column: int, machine: int, pid: int) -> Iterable[Step]:
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
    rules = {
        "clone": _if_bit(0, _THREAD),
        "tgkill": _if_one_of(0, (pid,)),
        "kill": _if_one_of(0, (pid,)),
        "prctl": _if_one_of(0, _PRCTL),
        "prlimit64": [*_loads_zero(2), *_loads_zero(2, high=True), (_RETURN, 0, 0, _ALLOW)],  # to ask only
        "fcntl": _unless_one_of(1, _OWNER_OF_SIGNALS),
        "ioctl": _unless_one_of(1, _TERMINAL_INPUT),
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
    steps = [_argument(index)]
    for value in values:
        steps += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*steps, _refuse(errno.EPERM)]


def _unless_one_of(index: int, values: Iterable[int]) -> list[Step]:
    steps = [_argument(index)]
    for value in values:
        steps += [(_EQUAL, 0, 1, value), _refuse(errno.EPERM)]
    return [*steps, (_RETURN, 0, 0, _ALLOW)]


def _loads_zero(index: int, *, high: bool = False) -> list[Step]:
    """Go on only if a half of an argument is zero."""
    return [_argument(index, high=high), (_EQUAL, 1, 0, 0), _refuse(errno.EPERM)]
