"""The messages between a sandboxed process and its parent, and the child's side of them.

A message is a word of a few bytes on a socket; all else lies in shared memory (`memory.py`), a header of JSON
after the arrays. So a message is sent and read in one go, and neither side waits for the other to read.

The child is forked from a fork server that has its libraries imported. Its first message is an order: what it
may read and take, whether it is sandboxed, and the target to load: a function that gets the order's options
and returns what the parent is told of it, and what handles calls. It ends when its parent does.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import orjson

from kindler import sandbox
from kindler.errors import ConfigError, DataError, KindlerError, MissingExtraError, UntrustedError
from kindler.sandbox.memory import Area, layout, read_arrays

WORD = struct.Struct("<cBQQ")  # what it is, the number of the area, and where the header lies: offset, bytes
CALL = b"c"  # from the parent: an order or a call, in an area of the child's own or in one that comes with it
REPLY = b"r"  # to the parent: an answer, in the area of the call's number
INPUT_BYTES = 16 << 20  # of an area that are kept; larger inputs get one of their own

Fields: TypeAlias = dict[str, Any]
Answer: TypeAlias = tuple[Mapping[str, Any], Mapping[str, Any]]


class Pending(Protocol):
    """A call that something else computes, such as a GPU: the next one may begin meanwhile."""

    def is_ready(self) -> bool: ...

    def wait(self) -> Answer: ...


# Gets the fields and arrays of a call, and returns those of its answer. Arrays lie in shared memory, and are
# overwritten by the next call in the same area; `bytes` are the child's own. One that has a method `attach`
# is given the memory that calls will lie in.
Handler: TypeAlias = Callable[[Fields, dict[str, Any]], Answer | Pending]
Target: TypeAlias = Callable[[Fields], tuple[Mapping[str, Any], Handler]]

MOST_CALLS = 8  # at a time
_LOOK_S = 5e-5  # between two looks at a pending call, if no other comes
_MOST_MESSAGE = 12_000
_KNOWN: dict[str, type[Exception]] = {
    "ConfigError": ConfigError,
    "DataError": DataError,
    "MemoryError": MemoryError,
}


def main(sock: socket.socket) -> int:
    """Serve until the parent is gone; returns the exit status."""
    faulthandler.enable()
    sock.settimeout(None)
    try:
        _, _, size, length, fds = read_word(sock)
    except EOFError:
        return 0
    calls = Calls(sock, [Area(fd, size) for fd in fds])
    order = orjson.loads(calls.areas[0].memory[:length])
    try:
        _restrict(order, keep={sock.fileno(), *fds})
        module, _, name = order["target"].partition(":")
        target: Target = getattr(importlib.import_module(module), name)
        fields, handle = target(order["options"])
        if (attach := getattr(handle, "attach", None)) is not None:
            attach([area.memory for area in calls.areas])
        calls.answer(0, {"loaded": fields, "arrays": []})
    except BaseException as exc:  # noqa: BLE001 - the edge of the process: the parent is told
        calls.answer(0, {"error": encoded_error(exc)})
        return 1
    with suppress(EOFError, OSError):  # the parent is gone
        calls.serve(handle)
    return 0


def _restrict(order: Fields, *, keep: set[int]) -> None:
    sandbox.limit(order["memory_bytes"])
    if order["sandboxed"] is False:
        return
    os.chdir("/")
    try:
        sandbox.enter(map(Path, order["readable"]), keep=keep)
    except OSError as exc:
        if order["sandboxed"]:
            raise
        sys.stderr.write(f"a process is not sandboxed: {exc.strerror}.\n")


@dataclass(slots=True)
class _Call:
    """A call that was begun: where its answer goes, and within which limits."""

    number: int  # of its area
    start: int
    arrow: bool
    output_bytes: int
    large: Area | None


class Calls:
    """The child's end of the socket; `areas` are for its answers, and for calls that are not large. There may
    be as many calls at a time as there are areas."""

    def __init__(self, sock: socket.socket, areas: Sequence[Area]) -> None:
        self._sock = sock
        self.areas = areas

    def answer(self, number: int, fields: Fields) -> None:
        """Answer without arrays."""
        self._sock.sendall(WORD.pack(REPLY, number, *self.areas[number].write(orjson.dumps(fields))))

    def serve(self, handle: Handler) -> None:
        """Answer calls in their order; raises EOFError when there will be none."""
        under_way: deque[tuple[_Call, Pending]] = deque()
        while True:
            if under_way and not self._comes_before(under_way[0][1]):
                call, pending = under_way.popleft()
                self._end(call, pending.wait)
                continue
            call, fields, inputs = self._next()
            try:
                answer = handle(fields, inputs)
            except BaseException as exc:  # noqa: BLE001 - whatever it raises is told to whoever called
                self._end(call, partial(_raise, exc))
                continue
            finally:
                del inputs
            if isinstance(answer, tuple):
                self._end(call, partial(_same, answer))
            else:
                under_way.append((call, answer))

    def _comes_before(self, pending: Pending) -> bool:
        """Whether another call comes before a pending one is ready."""
        while not pending.is_ready():
            if select.select([self._sock], [], [], _LOOK_S)[0]:
                return True
        return False

    def _next(self) -> tuple[_Call, Fields, dict[str, Any]]:
        """Wait for a call."""
        _, number, at, length, fds = read_word(self._sock)
        large = Area(fds[0], os.fstat(fds[0]).st_size) if fds else None
        memory, start = (self.areas[number].memory, at + length) if large is None else (large.memory, 0)
        fields = orjson.loads(memory[at : at + length])
        call = _Call(number, start, fields.pop("arrow"), fields.pop("output_bytes"), large)
        return call, fields, read_arrays(memory, fields.pop("arrays"), trusted=True)

    def _end(self, call: _Call, wait: Callable[[], Answer]) -> None:
        area = self.areas[call.number]
        try:
            answer, outputs = wait()
            parts = {name: [array] for name, array in outputs.items()}
            plan = layout(parts, arrow=call.arrow, at=call.start)
            header = orjson.dumps({**answer, "arrays": plan.entries})
            size = plan.size - call.start + len(header)
            if size > call.output_bytes or plan.size + len(header) > area.size:
                raise MemoryError(
                    f"the outputs have {size} bytes; the server accepts at most {call.output_bytes}"
                )
            plan.write(area.memory)
        except BaseException as exc:  # noqa: BLE001 - whatever it raises is told to whoever called
            self.answer(call.number, {"error": encoded_error(exc)})
            return
        finally:
            if call.large is not None:
                call.large.close()  # arrays that lie in it keep it
        self._sock.sendall(WORD.pack(REPLY, call.number, *area.write(header, plan.size)))


def _same(answer: Any) -> Any:
    return answer


def _raise(error: BaseException) -> Answer:
    raise error


def read_word(sock: socket.socket) -> tuple[bytes, int, int, int, list[int]]:
    """Wait for a word: what it is, three numbers, and the descriptors that came with it. `EOFError`: the
    other side is gone."""
    data, fds = b"", []
    while len(data) < WORD.size:
        some, got, _, _ = socket.recv_fds(sock, WORD.size - len(data), MOST_CALLS)
        fds += got
        if not some:
            raise EOFError
        data += some
    return (*WORD.unpack(data), fds)


class RemoteError(Exception):
    """An exception of a child, whose class may be unknown here: `name` is that of its class, `http_status`
    the status that it asks to be answered with, if it says one."""

    def __init__(self, name: str, message: str, http_status: Any = None) -> None:
        self.name = name
        self.http_status = http_status
        super().__init__(message)


def encoded_error(error: BaseException) -> Fields:
    status, text = getattr(error, "http_status", None), str(error)[:_MOST_MESSAGE]
    fields: Fields = {
        "type": type(error).__name__,
        "message": text.encode(errors="replace").decode(),
        "status": status if type(status) is int else None,
    }
    if isinstance(error, UntrustedError):
        fields["fields"] = {"what": error.what, "reason": error.reason}
    elif isinstance(error, MissingExtraError):
        what = str(error).partition(" needs ")[0]
        fields["fields"] = {"what": what, "package": error.package, "extra": error.extra}
    elif isinstance(error, KindlerError) and not isinstance(error, DataError):
        fields["type"] = "ConfigError"
    elif isinstance(error, MemoryError):  # numpy has a class of its own
        fields["type"] = "MemoryError"
    return fields


def decoded_error(fields: Any) -> Exception:
    """The exception again: one of a few classes of Kindler's, or a `RemoteError`."""
    if not isinstance(fields, dict):
        return RemoteError("Exception", "")
    name, message = str(fields.get("type")), str(fields.get("message"))[:_MOST_MESSAGE]
    more = fields.get("fields")
    try:
        if name == "UntrustedError" and more:
            what, reason = (str(more[key])[:_MOST_MESSAGE] for key in ("what", "reason"))
            return UntrustedError(what=what, reason=reason)
        if name == "MissingExtraError" and more:
            names = ("what", "package", "extra")
            return MissingExtraError(**{key: str(more[key])[:_MOST_MESSAGE] for key in names})
    except (TypeError, KeyError):
        pass  # not what it says it is
    known = _KNOWN.get(name)
    return RemoteError(name[:100], message, fields.get("status")) if known is None else known(message)
