"""One call of gRPC, on one stream of a connection: its messages, its answer, its end.

What a call has sent and nobody has answered yet counts as held by the server from its first byte on; a call
that would be too much is refused before the rest of it arrives.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections import deque
from collections.abc import Iterable
from typing import Protocol
from urllib.parse import quote

from kindler.serve.deadlines import within
from kindler.serve.grpc_api.header_fields import Field, written
from kindler.serve.http_errors import Problem
from kindler.serve.request_body import Bodies

__all__ = ["Call", "Head", "Link", "head_of"]

_PREFIX = struct.Struct(">BI")  # whether the message is compressed, and its length
_WINDOW = 1 << 20  # what a call may send before it is read, once it is known who sends it
_PSEUDO = frozenset((":method", ":scheme", ":authority", ":path"))
_OF_CONNECTIONS = frozenset(("connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"))
_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])", re.ASCII)
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_OPENING = b"\x88" + written(
    [("content-type", "application/grpc"), ("grpc-accept-encoding", "identity,deflate,gzip")]
)
_DONE = written([("grpc-status", "0")])
_PLAIN = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"  # what quote would write in another way
_MOST_MESSAGE = 4000


class Head:
    """The header fields of a call.

    Attributes:
        path: The service and the method.
        headers: Fields by name, without those of HTTP/2 itself and those that are not text.
        timeout_s: The seconds that the client waits; None if it did not say.
        encoding: How messages may be compressed.
        status: The HTTP status for what is no call of gRPC, else 0.
        is_malformed: Whether it is no request at all.
    """

    __slots__ = ("encoding", "headers", "is_malformed", "path", "status", "timeout_s")

    def __init__(self, pseudo: dict[str, str], headers: dict[str, str], *, malformed: bool) -> None:
        self.path = pseudo.get(":path", "")
        self.headers = headers
        self.encoding = headers.get("grpc-encoding", "identity")
        self.is_malformed = malformed
        self.status = 0
        if pseudo.get(":method") != "POST":
            self.status = 405
        elif not headers.get("content-type", "").startswith("application/grpc"):
            self.status = 415
        given = _TIMEOUT.fullmatch(headers.get("grpc-timeout", ""))
        self.timeout_s = None if given is None else int(given[1]) * _UNITS[given[2]]


def head_of(fields: list[Field]) -> Head:
    """What the header fields of a request say."""
    pseudo: dict[str, str] = {}
    headers: dict[str, str] = {}
    malformed = False
    for name, value in fields:
        if name.startswith(":"):
            malformed |= bool(headers) or name in pseudo or name not in _PSEUDO
            pseudo[name] = value
        elif name in _OF_CONNECTIONS or name != name.lower() or not name:
            malformed = True
        elif not name.endswith("-bin"):
            headers[name] = f"{headers[name]},{value}" if name in headers else value
    malformed |= not (":method" in pseudo and ":path" in pseudo and ":scheme" in pseudo)
    return Head(pseudo, headers, malformed=malformed)


class Link(Protocol):
    """The connection, as a call sees it."""

    peer: str

    @property
    def is_drained(self) -> bool:
        """Whether the client takes what is sent."""

    def fields(self, call: Call, block: bytes, *, last: bool = False) -> None:
        """Send header fields; the last ones end the call."""

    def content(self, call: Call, content: bytes) -> None:
        """Send content, now or as the client allows it."""

    def widen(self, call: Call, by: int) -> None:
        """Let the client send so much more."""


class Call:
    """A call.

    Args:
        link: Its connection.
        number: The number of its stream.
        head: Its header fields.
        may_send_bytes: What may be sent to it.
        may_receive: What it may send.
        ended: Whether it sends nothing more.

    Attributes:
        bodies: Counts what is held; set by whoever answers it.
        task: Answers it.
        streams: Whether it may send several messages.
        to_send: What the client has not allowed to be sent yet.
        trailers: The header fields that end the call, if they wait for that.
    """

    __slots__ = (
        "_admitted",
        "_chunks",
        "_drained",
        "_gone",
        "_held",
        "_link",
        "_need",
        "_problem",
        "_size",
        "_started",
        "_waiter",
        "bodies",
        "ended",
        "head",
        "may_receive",
        "may_send_bytes",
        "number",
        "streams",
        "task",
        "to_send",
        "trailers",
    )

    def __init__(
        self, link: Link, number: int, head: Head, may_send_bytes: int, may_receive: int, *, ended: bool
    ) -> None:
        self._link = link
        self.number = number
        self.head = head
        self.may_send_bytes = may_send_bytes
        self.may_receive = may_receive
        self.ended = ended
        self.bodies: Bodies | None = None
        self.task: asyncio.Task[None] | None = None
        self.streams = False
        self.to_send: deque[memoryview] = deque()
        self.trailers: bytes | None = None
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._need = _PREFIX.size
        self._held = 0
        self._problem: Problem | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._admitted = self._started = self._gone = False

    @property
    def peer(self) -> str:
        """The address of the client."""
        return self._link.peer

    # What the connection tells.

    def received(self, content: bytes, *, ended: bool) -> None:
        """Content has arrived."""
        self.ended = ended
        if content and self._problem is None and self.bodies is not None and not self._gone:
            try:
                self.bodies.hold(len(content), of_it=self._held)
            except Problem as problem:
                self._problem = problem
                self._drop()
            else:
                self._held += len(content)
                self._chunks.append(content)
                self._size += len(content)
                if self._admitted:
                    self._top_up()
        if self._waiter is not None and (ended or self._problem is not None or self._size >= self._need):
            _wake(self._waiter)

    def lost(self) -> None:
        """The client has taken it back, or is gone."""
        self._gone = True
        self.to_send.clear()
        self.over()  # its task may not have begun, and would not do so any more
        if self.task is not None:
            self.task.cancel()

    def may_send(self) -> None:
        """The client takes more."""
        if self._drained is not None:
            _wake(self._drained)

    # What whoever answers it asks for.

    def admitted(self) -> None:
        """Its client is known, and may send more than a little."""
        self._admitted = True
        self._top_up()

    async def message(self, most_bytes: int, timeout_s: float) -> bytes | None:
        """The next message, decompressed; None if there is none.

        Raises:
            Problem: It is too large, takes too long, is none, or the server holds too much already.
        """
        while True:
            if self._problem is not None:
                raise self._problem
            if self._size >= _PREFIX.size and self._need == _PREFIX.size:
                compressed, length = _PREFIX.unpack(self._peek())
                if length > most_bytes:
                    raise Problem(413, f"the message has {length} bytes; at most {most_bytes} are allowed.")
                if compressed > 1:
                    raise Problem(400, "the message has no valid prefix.")
                self._need += length
                if self._admitted:
                    self._top_up()
                if not length:
                    break
            if self._size >= self._need > _PREFIX.size:
                break
            if self.ended:
                if not self._size:
                    return None
                raise Problem(400, "the call ends in the middle of its message.")
            await self._more(timeout_s)
        content = self._take()
        if not content[0]:
            return content[_PREFIX.size :]
        return await self._decompressed(content[_PREFIX.size :], most_bytes)

    def let_go(self) -> None:
        """What was taken of it so far is not needed any more."""
        if self.bodies is not None:
            self.bodies.let_go_of(self._held - self._size)
        self._held = self._size

    def send(self, message: bytes) -> None:
        """Send a message."""
        if self._gone:
            return
        if not self._started:
            self._started = True
            self._link.fields(self, _OPENING)
        self._link.content(self, _PREFIX.pack(0, len(message)) + message)

    async def drained(self) -> None:
        """Wait until the client has taken what was sent."""
        while (self.to_send or not self._link.is_drained) and not self._gone:
            self._drained = asyncio.get_running_loop().create_future()
            try:
                await self._drained
            finally:
                self._drained = None

    def finish(self, status: int, message: str = "", trailing: Iterable[Field] = ()) -> None:
        """End the call.

        Args:
            status: The status by gRPC's numbers.
            message: What was wrong.
            trailing: Other fields.
        """
        if self._gone:
            return
        block = _DONE if status == 0 else written([("grpc-status", str(status))])
        if message:
            block += written([("grpc-message", quote(message[:_MOST_MESSAGE], safe=_PLAIN))])
        block += written(trailing)
        if self.to_send:
            self.trailers = block
        else:
            self._link.fields(self, block if self._started else _OPENING + block, last=True)

    def refuse(self) -> None:
        """Answer what is no call of gRPC, with the HTTP status of its head."""
        self._link.fields(self, written([(":status", str(self.head.status))]), last=True)

    def over(self) -> None:
        """Nobody answers it any more; what it still sends is dropped."""
        self._drop()
        self.bodies = None

    async def _more(self, timeout_s: float) -> None:
        """Wait until there is what is needed, or an end."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            if self.streams and not self._size:
                await self._waiter  # between messages, a client may take its time
            else:
                with within(timeout_s):
                    await self._waiter
        except TimeoutError:
            raise Problem(408, f"the message did not arrive within {timeout_s:g} s.") from None
        finally:
            self._waiter = None

    def _peek(self) -> bytes:
        first = self._chunks[0]
        if len(first) < _PREFIX.size:
            first = b"".join(self._chunks)
            self._chunks = deque([first])
        return first[: _PREFIX.size]

    def _take(self) -> bytes:
        """The bytes of the next message with its prefix."""
        need, self._need = self._need, _PREFIX.size
        parts, size = [], 0
        while size < need:
            parts.append(self._chunks.popleft())
            size += len(parts[-1])
        if size > need:
            last = parts.pop()
            keep = len(last) - (size - need)
            parts.append(last[:keep])
            self._chunks.appendleft(last[keep:])
        self._size -= need
        if self._admitted:
            self._top_up()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _decompressed(self, content: bytes, most_bytes: int) -> bytes:
        coding = self.head.encoding
        if coding not in ("gzip", "deflate"):
            raise Problem(501, f"unsupported compression {coding[:40]!r}; expected gzip or deflate.")
        bodies = self.bodies
        if bodies is None:  # the call is over
            return b""
        larger = await bodies.decompressed(content, coding, most_bytes)
        if self.bodies is not None:
            bodies.hold(len(larger), of_it=self._held)
            self._held += len(larger)
        return larger

    def _top_up(self) -> None:
        """Let the client go on, unless whole messages wait already."""
        whole = self._size if self._size >= self._need > _PREFIX.size else 0
        room = _WINDOW - self.may_receive - (whole if self.streams else 0)
        if not self.ended and room >= _WINDOW // 2:
            self._link.widen(self, room)

    def _drop(self) -> None:
        self._chunks.clear()
        self._size, self._need = 0, _PREFIX.size
        if self.bodies is not None:
            self.bodies.let_go_of(self._held)
        self._held = 0


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
