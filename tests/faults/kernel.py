"""Faults at system calls: the k-th write, fsync, rename, send or fork of a program fails, is torn, or kills.

A watched process has a seccomp filter that asks this process before each call of interest. Its threads and
all processes that it starts have the same filter, so the files of SQLite and Arrow, and what workers send,
pass here as well, and the code under test is the product's, unchanged. Once nothing of the program runs, the
kernel says so: nothing that it has started can be overlooked.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import select
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

# What a call does -> its numbers on x86-64.
CALLS = {
    "create": (2, 257),  # open, openat: only with O_CREAT
    "write": (
        1,
        18,
        20,
        296,
        40,
        326,
        77,
    ),  # write, pwrite64, writev, pwritev, sendfile, copy_file_range, ftruncate
    "sync": (74, 75),
    "rename": (82, 264, 316),
    "link": (86, 265),
    "unlink": (87, 263, 84),  # unlink, unlinkat, rmdir
    "mkdir": (83, 258),
    "connect": (42,),
    "send": (44, 46),  # sendto, sendmsg
    "receive": (45, 47),  # recvfrom, recvmsg
    "fork": (57, 58, 56),  # fork, vfork, clone: no threads
}
FILES = ("create", "write", "sync", "rename", "link", "unlink", "mkdir")
NETWORK = ("connect", "send", "receive", "fork")
# How each fails where no other reason is asked for.
ERRORS = {
    **dict.fromkeys(("create", "write", "mkdir", "link"), errno.ENOSPC),
    **dict.fromkeys(("sync", "rename", "unlink"), errno.EIO),
    "connect": errno.ECONNREFUSED,
    "send": errno.EPIPE,
    "receive": errno.ECONNRESET,
    "fork": errno.EAGAIN,
}
ROLES = ("driver", "child", "grandchild")
DELAY_S = 0.03

_KIND = {number: kind for kind, numbers in CALLS.items() for number in numbers}
_OF_DESCRIPTOR = (1, 18, 20, 296, 40, 77, 74, 75, 42, 44, 45, 46, 47)
_PATHS = {  # where a call has its path: the descriptor of a folder, and the text; of renames, the new name
    **dict.fromkeys((2, 87, 84, 83), (None, 0)),
    **dict.fromkeys((82, 86), (None, 1)),
    **dict.fromkeys((257, 263, 258), (0, 1)),
    **dict.fromkeys((264, 316, 265), (2, 3)),
}
_MACHINE, _X86 = 4, 0xC000003E
_LOAD, _EQUAL, _SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ASK = 0x7FFF0000, 0x7FC00000
_THREAD = 0x00010000
_NEW_LISTENER, _WAIT_KILLABLE = 1 << 3, 1 << 5
_SECCOMP, _PIDFD_OPEN, _PIDFD_GETFD = 317, 434, 438
_NO_NEW_PRIVILEGES = 38
_RECEIVE, _ANSWER, _GO_ON = 0xC0502100, 0xC0182101, 1
_CONTROL = 900  # the descriptor on which a child passes its listener; the filter lets it through
_NOTICE = struct.Struct("=QIIiIQ6Q")
_REPLY = struct.Struct("=QqiI")


@dataclass(frozen=True, slots=True)
class Point:
    """A call that a fault can hit."""

    kind: str
    path: str  # of the file; "socket:[...]", or "" of a fork
    role: str  # "driver" for the watched process itself, "child" and "grandchild"
    pid: int

    def __str__(self) -> str:
        return f"{self.kind} {self.path} ({self.role})"


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at the k-th point (from 0).

    Kinds: "error"; "full" (as "error", and so do all that write from then on); "kill"; "torn" (half of the
    bytes are written and the process is killed, or half are sent and the connection closes); "short" (half of
    the bytes are written, which the caller is told); "delay"; "meanwhile" (`event` runs before the call).
    """

    k: int
    kind: str
    event: Callable[[], None] | None = None


@functools.cache
def missing() -> str:
    """Why this machine cannot do it; "" if it can."""
    if os.uname().machine != "x86_64" or os.uname().sysname != "Linux":
        return "faults at system calls need Linux on x86-64"
    try:
        with watched(lambda talk: talk.send("here"), lambda point: False) as program:
            assert program.hear(10) == "here"
    except OSError as exc:
        return f"the kernel lets no process watch the system calls of another one: {exc}"
    return ""


class Watched:
    """A program whose calls pass by here; see `watched`.

    Attributes:
        points: The calls so far, since `arm`.
        hit: The one that the fault has hit.
        talk: The connection to the program.
    """

    def __init__(self, pid: int, listener: int, talk: Connection, counts: Callable[[Point], bool]) -> None:
        self.pid, self.talk = pid, talk
        self.points: list[Point] = []
        self.hit: Point | None = None
        self._listener, self._counts = listener, counts
        self._fault: Fault | None = None
        self._roles = {pid: "driver"}
        self._problem = ""
        self._thread = threading.Thread(target=self._watch, name="faults", daemon=True)
        self._thread.start()

    def arm(self, fault: Fault | None, counts: Callable[[Point], bool] | None = None) -> None:
        """Count from here, and let this happen."""
        self._counts = counts or self._counts
        self.points, self.hit, self._fault = [], None, fault

    def disarm(self) -> None:
        self._fault = None

    def hear(self, timeout_s: float) -> Any:
        """What the program says next; EOFError if it ends first, TimeoutError if it says nothing."""
        if not self.talk.poll(timeout_s):
            raise TimeoutError(f"the program said nothing for {timeout_s:g} s; fault at {self.hit}")
        return self.talk.recv()

    def ended(self, timeout_s: float) -> bool:
        """Whether the program and all that it has started end in time."""
        self._thread.join(timeout_s)
        assert not self._problem, self._problem
        return not self._thread.is_alive()

    def processes(self) -> set[int]:
        """Those that have made a call so far."""
        return set(self._roles)

    def left(self, *roles: str) -> list[str]:
        """The command lines of what still runs, of these roles or all."""
        known = list(self._roles.items())
        return [words for pid, role in known if role in (roles or ROLES) and (words := _command(pid))]

    def close(self) -> None:
        deadline = time.monotonic() + 20
        while self._thread.is_alive() and time.monotonic() < deadline:
            for pid in list(self._roles):
                _kill(pid)
            self._thread.join(0.1)
        self.talk.close()
        os.waitpid(self.pid, 0)
        os.close(self._listener)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        try:
            while True:
                if any(events & select.POLLHUP for _, events in poll.poll()):
                    return
                notice = bytearray(_NOTICE.size)
                try:
                    fcntl.ioctl(self._listener, _RECEIVE, notice)
                except OSError as exc:
                    if exc.errno in (errno.ENOENT, errno.EINTR):
                        continue  # killed meanwhile
                    raise
                self._decide(*_NOTICE.unpack(notice))
        except Exception:
            self._problem = traceback.format_exc()
            for pid in list(self._roles):
                _kill(pid)

    def _decide(self, notice: int, pid: int, _: int, number: int, *rest: int) -> None:
        arguments = rest[2:]
        with suppress(OSError):  # it is gone
            process = _process(pid)
            point = Point(_KIND[number], _path(pid, number, arguments), self._role(process), process)
            if self._counts(point):
                self.points.append(point)
                if self._hits(point, len(self.points) - 1):
                    self.hit = self.hit or point
                    self._strike(notice, pid, number, arguments, point)
                    return
        self._answer(notice)

    def _hits(self, point: Point, k: int) -> bool:
        fault = self._fault
        if fault is None:
            return False
        lasting = fault.kind == "full" and k > fault.k and ERRORS[point.kind] == errno.ENOSPC
        return k == fault.k or lasting

    def _strike(self, notice: int, pid: int, number: int, arguments: Iterable[int], point: Point) -> None:
        assert self._fault is not None
        kind = self._fault.kind
        if kind == "delay":
            time.sleep(DELAY_S)
        elif kind == "meanwhile" and self._fault.event is not None:
            self._fault.event()
        elif kind in ("error", "full"):
            self._answer(notice, error=ERRORS[point.kind])
            return
        elif kind == "kill":
            _kill(_process(pid))
        elif kind in ("torn", "short"):
            count = _half(pid, number, tuple(arguments), closes=kind == "torn")
            if kind == "short" and count:
                self._answer(notice, value=count)
                return
            if kind == "torn" and point.kind == "send":
                self._answer(notice, error=errno.EPIPE)
                return
            if kind == "torn":
                _kill(_process(pid))
        self._answer(notice)

    def _answer(self, notice: int, *, value: int = 0, error: int = 0) -> None:
        going = 0 if value or error else _GO_ON
        with suppress(FileNotFoundError):  # it was killed
            fcntl.ioctl(self._listener, _ANSWER, bytearray(_REPLY.pack(notice, value, -error, going)))

    def _role(self, pid: int) -> str:
        if pid not in self._roles:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            self._roles[pid] = "child" if parent == self.pid else "grandchild"
        return self._roles[pid]


@contextmanager
def watched(
    work: Callable[[Connection], object],
    counts: Callable[[Point], bool],
    *,
    calls: Iterable[str] = tuple(CALLS),
    fault: Fault | None = None,
) -> Iterator[Watched]:
    """Run `work` in a forked process, with a connection to this one; `counts` says which calls are points."""
    control, theirs = socket.socketpair()
    talk, their_talk = Pipe()
    pid = os.fork()
    if pid == 0:
        _be_watched(work, theirs, their_talk, (control, talk), calls)
    data, listeners = b"the program said nothing", []
    with control, suppress(OSError):
        theirs.close()
        their_talk.close()
        control.settimeout(10)
        data, listeners, _, _ = socket.recv_fds(control, 200, 1)
    if not listeners:
        os.waitpid(pid, 0)
        raise OSError(data.decode())
    program = Watched(pid, listeners[0], talk, counts)
    program.arm(fault)
    talk.send("begin")
    try:
        yield program
    finally:
        program.close()


def _be_watched(
    work: Callable[[Connection], object],
    control: socket.socket,
    talk: Connection,
    others: tuple[Any, ...],
    calls: Iterable[str],
) -> None:
    status = 1
    try:
        for other in others:
            other.close()
        os.setsid()
        os.dup2(control.fileno(), _CONTROL, inheritable=False)
        control.close()
        passing = socket.socket(fileno=_CONTROL)
        try:
            listener = _install([number for call in calls for number in CALLS[call]])
        except OSError as exc:
            passing.sendall(str(exc).encode())
            return
        socket.send_fds(passing, [b"+"], [listener])
        passing.close()
        os.close(listener)
        talk.recv()  # its end of the listener is in use
        work(talk)
        status = 0
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _install(numbers: Iterable[int]) -> int:
    steps: list[tuple[int, int, int, int]] = [
        *[(_LOAD, 0, 0, _MACHINE), (_EQUAL, 1, 0, _X86), (_RETURN, 0, 0, _ALLOW)],
        (_LOAD, 0, 0, 0),
    ]
    ask, allow = (_RETURN, 0, 0, _ASK), (_RETURN, 0, 0, _ALLOW)
    for number in numbers:
        rule = [ask]
        if number in (2, 257):
            rule = [_argument(1 if number == 2 else 2), (_SET, 0, 1, os.O_CREAT), ask, allow]
        elif number == 56:
            rule = [_argument(0), (_SET, 1, 0, _THREAD), ask, allow]
        elif number == 46:
            rule = [_argument(0), (_EQUAL, 1, 0, _CONTROL), ask, allow]
        steps += [(_EQUAL, 0, len(rule), number), *rule]
    steps.append(allow)
    block = b"".join(struct.pack("=HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(block, len(block))
    program = struct.pack("=H6xQ", len(steps), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    listener: int = libc.syscall(_SECCOMP, 1, _NEW_LISTENER | _WAIT_KILLABLE, program)
    if listener < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return listener


def _argument(index: int) -> tuple[int, int, int, int]:
    return _LOAD, 0, 0, 16 + 8 * index


def _path(pid: int, number: int, arguments: tuple[int, ...]) -> str:
    if number in _OF_DESCRIPTOR or number == 326:
        return os.readlink(f"/proc/{pid}/fd/{arguments[2 if number == 326 else 0]}")
    if number not in _PATHS:
        return ""
    folder, text = _PATHS[number]
    path = os.fsdecode(_text(pid, arguments[text]))
    if path.startswith("/"):
        return path
    at = -100 if folder is None else ctypes.c_int32(arguments[folder]).value
    return os.path.join(os.readlink(f"/proc/{pid}/cwd" if at < 0 else f"/proc/{pid}/fd/{at}"), path)


def _text(pid: int, address: int) -> bytes:
    text = b""
    while b"\0" not in text:
        text += _memory(pid, address + len(text), 4096 - (address + len(text)) % 4096)
    return text.partition(b"\0")[0]


def _memory(pid: int, address: int, size: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(size) or b""


def _half(pid: int, number: int, arguments: tuple[int, ...], *, closes: bool) -> int:
    """Write or send half of what the call would, on its descriptor; how many bytes that were."""
    if number in (1, 18, 44):
        pieces = [(arguments[1], arguments[2])]
    elif number in (20, 46):
        address, count = arguments[1], arguments[2]
        if number == 46:
            address, count = struct.unpack("=16xQQ", _memory(pid, arguments[1], 32))
        packed = _memory(pid, address, 16 * count)
        pieces = [struct.unpack_from("=QQ", packed, 16 * i) for i in range(count)]
    else:
        return 0
    data = b"".join(_memory(pid, start, size) for start, size in pieces if size)
    half = data[: len(data) // 2]
    libc = ctypes.CDLL(None, use_errno=True)
    process = libc.syscall(_PIDFD_OPEN, _process(pid), 0)
    copy = libc.syscall(_PIDFD_GETFD, process, ctypes.c_int(arguments[0]), 0)
    os.close(process)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    try:
        if number == 18:
            os.pwrite(copy, half, arguments[3])
        elif half:
            os.write(copy, half)
        if closes and number in (44, 46):
            with socket.socket(fileno=os.dup(copy)) as ending, suppress(OSError):
                ending.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(copy)
    return len(half)


def _process(task: int) -> int:
    for line in Path(f"/proc/{task}/status").read_text().splitlines():
        if line.startswith("Tgid:"):
            return int(line.split()[1])
    raise ProcessLookupError(task)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()[:200]
    except OSError:
        return ""


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
