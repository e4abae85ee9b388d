"""Seccomp: the kernel refuses every system call of a process that is not on a list.

The list is a small program that the kernel runs before each call. It names what is allowed: whatever a later
kernel adds is refused until it is named here. Numbers are those of x86-64 and of 64-bit ARM.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Mapping
from typing import TypeAlias

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

_Numbers: TypeAlias = tuple[int | None, int | None]  # None: the machine has no such call

_MACHINES: Mapping[str, tuple[int, int]] = {  # by `os.uname().machine`: column here, the kernel's own name
    "x86_64": (0, 0xC000003E),
    "aarch64": (1, 0xC00000B7),
}

# fmt: off
_ALLOWED: Mapping[str, _Numbers] = {
    # Files and descriptors that are open, and opening: which paths open is Landlock's to say.
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "close": (3, 57),
    "close_range": (436, 436), "fstat": (5, 80), "stat": (4, None), "lstat": (6, None),
    "newfstatat": (262, 79), "statx": (332, 291), "lseek": (8, 62), "access": (21, None),
    "faccessat": (269, 48), "faccessat2": (439, 439), "open": (2, None), "openat": (257, 56),
    "openat2": (437, 437), "getdents": (78, None), "getdents64": (217, 61), "readlink": (89, None),
    "readlinkat": (267, 78), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "umask": (95, 166),
    "statfs": (137, 43), "fstatfs": (138, 44), "fadvise64": (221, 223), "readahead": (187, 213),
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "flock": (73, 32), "fsync": (74, 82),
    "fdatasync": (75, 83), "pipe": (22, None), "pipe2": (293, 59), "select": (23, None),
    "pselect6": (270, 72), "poll": (7, None), "ppoll": (271, 73), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "eventfd": (284, None), "eventfd2": (290, 19),
    # The socket that the process was born with; no other can be made.
    "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212),
    "shutdown": (48, 210),
    # Memory.
    "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "msync": (26, 227),
    "mincore": (27, 232), "madvise": (28, 233), "brk": (12, 214), "mlock": (149, 228),
    "munlock": (150, 229), "mlock2": (325, 284), "get_mempolicy": (239, 236), "set_mempolicy": (238, 237),
    "mbind": (237, 235),
    # Threads, signals to itself, time.
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132), "futex": (202, 98), "futex_waitv": (449, 449), "set_robust_list": (273, 99),
    "set_tid_address": (218, 96), "rseq": (334, 293),
    "membarrier": (324, 283), "restart_syscall": (219, 128), "arch_prctl": (158, None), "exit": (60, 93),
    "exit_group": (231, 94), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126),
    "sched_rr_get_interval": (148, 127), "getpriority": (140, 141), "getcpu": (309, 168),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
    "timer_create": (222, 107), "timer_settime": (223, 110), "timer_gettime": (224, 108),
    "timer_getoverrun": (225, 109), "timer_delete": (226, 111), "getitimer": (36, 102),
    "setitimer": (38, 103),
    # What it may know of itself and the machine.
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgrp": (111, None),
    "getpgid": (121, 155), "getsid": (124, 156), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158), "getresuid": (118, 148),
    "getresgid": (120, 150), "getrandom": (318, 278), "getrusage": (98, 165), "getrlimit": (97, 163),
    "uname": (63, 160), "sysinfo": (99, 179), "capget": (125, 90),
}
# fmt: on

# Allowed with some arguments only: see `_program`.
_CHECKED: Mapping[str, _Numbers] = {
    "mmap": (9, 222),
    "ioctl": (16, 29),
    "fcntl": (72, 25),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "clone": (56, 220),
    "tgkill": (234, 131),
    "kill": (62, 129),
}

# Refused in words of their own: what the caller makes of "no such call" or "no access" is better than EPERM.
_REFUSED: Mapping[str, _Numbers] = {
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "socketpair": (53, 199),
}


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
    return os.uname().machine in _MACHINES and ctypes.sizeof(ctypes.c_void_p) == 8


def refuse_other_calls(*, gpu: bool = False) -> None:
    """From now on this process makes no system call that is not on the list, nor gains privileges; `gpu` lets
    it control the devices of NVIDIA's driver."""
    column, machine = _MACHINES[os.uname().machine]
    steps = list(_program(column, machine, os.getpid(), gpu=gpu))
    block = (_Step * len(steps))(*(_Step(*step) for step in steps))
    program = _Program(len(steps), ctypes.cast(block, ctypes.c_void_p))
    no_new_privileges()
    _prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program))


def no_new_privileges() -> None:
    _prctl(_NO_NEW_PRIVILEGES, 1)


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
    for numbers in _ALLOWED.values():
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
    for name, numbers in _CHECKED.items():
        yield from _on(numbers[column], rules[name])
    for name, numbers in _REFUSED.items():
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
