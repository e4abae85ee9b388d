"""The system calls of a jailed process, by their numbers on x86-64 and on 64-bit ARM. Data, and no more.

A list of what is allowed: whatever a later kernel adds is refused until it is named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Numbers: TypeAlias = tuple[int | None, int | None]  # None: the machine has no such call

MACHINES: Mapping[str, tuple[int, int]] = {  # by `os.uname().machine`: the column here, the kernel's own name
    "x86_64": (0, 0xC000003E),
    "aarch64": (1, 0xC00000B7),
}

# fmt: off
ALLOWED: Mapping[str, Numbers] = {
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

# Allowed with some arguments only; see `seccomp.py`.
CHECKED: Mapping[str, Numbers] = {
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
REFUSED: Mapping[str, Numbers] = {
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "socketpair": (53, 199),
}
