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
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from kindler import sandbox
from kindler.errors import ConfigError, DataError, KindlerError, MissingExtraError, UntrustedError
from kindler.sandbox.memory import Area, layout, read_arrays

WORD = struct.Struct("<cQQ")  # what it is, and where the header lies: offset, bytes
CALL = b"c"  # from the parent: an order or a call, in the child's own area or in one that comes with it
REPLY = b"r"  # to the parent: an answer, in the child's own area

Fields: TypeAlias = dict[str, Any]
# Gets the fields and arrays of a call, and returns those of its answer. Arrays lie in shared memory, and are
# overwritten by the next call; `bytes` are the child's own.
Handler: TypeAlias = Callable[[Fields, dict[str, Any]], tuple[Mapping[str, Any], Mapping[str, Any]]]
Target: TypeAlias = Callable[[Fields], tuple[Mapping[str, Any], Handler]]

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
        _, size, length, fd = read_word(sock)
    except EOFError:
        return 0
    calls = Calls(sock, Area(fd, size))
    order = orjson.loads(calls.own.memory[:length])
    try:
        _restrict(order, keep={sock.fileno(), fd})
        module, _, name = order["target"].partition(":")
        target: Target = getattr(importlib.import_module(module), name)
        fields, handle = target(order["options"])
        calls.answer({"loaded": fields, "arrays": []})
    except BaseException as exc:  # noqa: BLE001 - the edge of the process: the parent is told
        calls.answer({"error": encoded_error(exc)})
        return 1
    try:
        while calls.serve_one(handle):
            pass
    except (EOFError, OSError):
        pass  # the parent is gone
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


class Calls:
    """The child's end of the socket; `own` is the area for its answers, and for calls that are not large."""

    def __init__(self, sock: socket.socket, own: Area) -> None:
        self._sock = sock
        self.own = own

    def answer(self, fields: Fields) -> None:
        """Answer without arrays."""
        self._sock.sendall(WORD.pack(REPLY, *self.own.write(orjson.dumps(fields))))

    def serve_one(self, handle: Handler) -> bool:
        """Wait for a call and answer it; False if there will be none."""
        try:
            _, at, length, fd = read_word(self._sock)
        except EOFError:
            return False
        large = Area(fd, os.fstat(fd).st_size) if fd >= 0 else None
        memory, start = (self.own.memory, at + length) if large is None else (large.memory, 0)
        try:
            fields = orjson.loads(memory[at : at + length])
            inputs, arrow = read_arrays(memory, fields.pop("arrays"), trusted=True), fields.pop("arrow")
            most = fields.pop("output_bytes")
            answer, outputs = handle(fields, inputs)
            plan = layout({name: [array] for name, array in outputs.items()}, arrow=arrow, at=start)
            header = orjson.dumps({**answer, "arrays": plan.entries})
            size = plan.size - start + len(header)
            if size > most or plan.size + len(header) > self.own.size:
                raise MemoryError(f"the outputs have {size} bytes; the server accepts at most {most}")
            plan.write(self.own.memory)
        except BaseException as exc:  # noqa: BLE001 - whatever it raises is told to whoever called
            self.answer({"error": encoded_error(exc)})
            return True
        finally:
            if large is not None:
                large.close()  # arrays that lie in it keep it
        self._sock.sendall(WORD.pack(REPLY, *self.own.write(header, plan.size)))
        return True


def read_word(sock: socket.socket) -> tuple[bytes, int, int, int]:
    """Wait for a word: what it is, two numbers, and the descriptor that came with it, or -1. `EOFError`: the
    other side is gone."""
    data, fds = b"", []
    while len(data) < WORD.size:
        some, got, _, _ = socket.recv_fds(sock, WORD.size - len(data), 1)
        fds += got
        if not some:
            raise EOFError
        data += some
    kind, first, second = WORD.unpack(data)
    return kind, first, second, fds[0] if fds else -1


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
