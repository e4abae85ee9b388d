"""What workers and a parameter server say to each other: a header of fixed size, then raw bytes.

Both ends have proved who they are before the first header. Nothing here is unpickled; text is JSON.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

_HEADER = struct.Struct("<4sHHqQ")
_MAGIC = b"KPS1"
_MOST_JSON_BYTES = 64 << 20


class Op(IntEnum):
    """What a message is."""

    HELLO = 1  # JSON: who calls, and the layout of its parameters
    STATE = 2  # a replica's state: train on from it
    PULL = 3  # the weights, to compute gradients with
    LOOK = 4  # the weights, to look at
    PUSH = 5  # gradients, computed with the weights of that version; the answer is that of PULL
    RELEASE = 6  # no gradients will come of the weights that were pulled last
    EPOCH = 7  # JSON: what an epoch brought; the answer has what happened at the server
    ENDED_EPOCH = 8  # JSON: the figures of an epoch, which a schedule may follow; the answer has the rates
    RATES = 9  # JSON: learning rates
    WRITE = 10  # weights, which replace the server's
    MERGE = 11  # a replica's state: its model counts; the answer is the state of the run
    OK = 16  # the answer; its version is the server's
    ENDED = 17  # the gradients were not applied: the run has made all its steps


class ProtocolError(Exception):
    """The other end does not speak this protocol."""


@dataclass(frozen=True, slots=True)
class Header:
    """The beginning of a message.

    Attributes:
        op: What it is.
        version: How many updates the weights have seen that it is about.
        nbytes: How many bytes follow.
        shared: Whether they lie in memory that both ends map instead.
    """

    op: Op
    version: int
    nbytes: int
    shared: bool = False


def send(sock: socket.socket, op: Op, *payload: Any, version: int = 0, shared: bool = False) -> None:
    """Send a message; with `shared` the payload stays where it is."""
    nbytes = sum(memoryview(part).nbytes for part in payload)
    parts: list[Any] = [_HEADER.pack(_MAGIC, op, int(shared), version, nbytes)]
    if not shared:
        parts += [memoryview(part).cast("B") for part in payload if memoryview(part).nbytes]
    _send_all(sock, parts)


def send_json(sock: socket.socket, op: Op, value: Any, *, version: int = 0) -> None:
    """Send a message of JSON."""
    send(sock, op, json.dumps(value).encode(), version=version)


def read_header(sock: socket.socket) -> Header:
    """The next message's header.

    Raises:
        ProtocolError: It is none.
        OSError: The connection broke.
    """
    data = bytearray(_HEADER.size)
    read_into(sock, memoryview(data))
    magic, op, flags, version, nbytes = _HEADER.unpack(data)
    try:
        if magic != _MAGIC:
            raise ValueError(f"it begins with {bytes(magic)!r}")
        return Header(Op(op), version, nbytes, bool(flags))
    except ValueError as exc:
        raise ProtocolError(f"not a message of this protocol: {exc}") from None


def read_into(sock: socket.socket, view: memoryview) -> None:
    """Fill `view` from the connection."""
    while view:
        got = sock.recv_into(view)
        if not got:
            raise ConnectionError("the other end closed the connection")
        view = view[got:]


def read_payload(sock: socket.socket, header: Header, *, most: int | None = None) -> bytearray:
    """The bytes that follow a header.

    Raises:
        ProtocolError: There are more than `most`.
    """
    if most is not None and header.nbytes > most:
        raise ProtocolError(f"{header.op.name} announces {header.nbytes:,} bytes; {most:,} are possible")
    try:
        data = bytearray(header.nbytes)
    except (MemoryError, OverflowError):
        raise ProtocolError(f"{header.op.name} announces {header.nbytes:,} bytes") from None
    read_into(sock, memoryview(data))
    return data


def read_json(sock: socket.socket, header: Header) -> Any:
    """The JSON that follows a header."""
    try:
        return json.loads(read_payload(sock, header, most=_MOST_JSON_BYTES))
    except ValueError as exc:
        raise ProtocolError(f"{header.op.name} is not JSON: {exc}") from None


def _send_all(sock: socket.socket, parts: list[Any]) -> None:
    while parts:
        sent = sock.sendmsg(parts)
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if sent:
            parts[0] = memoryview(parts[0])[sent:]
