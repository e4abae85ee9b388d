"""One connection of a gRPC client: HTTP/2 (RFC 9113), as far as a server that answers calls needs it.

Frames become calls (`calls.py`), and what calls send becomes frames. Everything a client can send is bounded:
the fields of a request, the calls at a time, and what it may send before somebody has looked at it. A client
that breaks a rule loses its connection; one that asks for work without an end in sight does so, too.

What is sent is written once for each turn of the event loop, for all calls together: that is most of what
makes many calls over one connection cheap.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol, cast

from kindler.serve.grpc_api.calls import Call, Head, head_of
from kindler.serve.grpc_api.header_fields import FieldError, FieldReader

__all__ = ["Connection", "Host"]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_NOT_HTTP2 = b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_FRAME = struct.Struct(">BHBBI")  # the length in two parts, the kind, flags, the stream
_HEAD_BYTES = 9
_SETTING = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")
_MOST_NUMBER = (1 << 31) - 1

_END_STREAM, _END_HEADERS, _PADDED, _PRIORITY, _ACK = 0x1, 0x4, 0x8, 0x20, 0x1
_MAX_STREAMS, _INITIAL_WINDOW, _MAX_FRAME, _MAX_FIELDS = 3, 4, 5, 6  # settings

_FRAME_BYTES = 16_384  # of a frame that is received
_FIELD_BYTES = 64 << 10
_MOST_CALLS = 1024  # of one client at a time
_FIRST_WINDOW = 1 << 20  # what a call may send before anybody looks at it
_WINDOW = 16 << 20  # the same for all calls of a connection together
_MOST_RESTLESS = 4096  # frames a second that ask for nothing: pings, settings, calls that are taken back


class _Kind(IntEnum):
    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RESET = 3
    SETTINGS = 4
    PUSH = 5
    PING = 6
    GO_AWAY = 7
    WINDOW = 8
    CONTINUATION = 9


class _Code(IntEnum):
    NONE = 0
    PROTOCOL = 1
    FLOW_CONTROL = 3
    STREAM_CLOSED = 5
    FRAME_SIZE = 6
    REFUSED = 7
    COMPRESSION = 9
    CALM = 11


class Host(Protocol):
    """What a connection belongs to."""

    def begin(self, call: Call) -> None:
        """A call has begun; its message may still be on its way."""

    def opened(self, connection: Connection) -> None:
        """A connection is there."""

    def closed(self, connection: Connection) -> None:
        """A connection is gone, and its calls with it."""


class _Broken(Exception):
    def __init__(self, code: _Code, message: str) -> None:
        self.code = code
        super().__init__(message)


class Connection(asyncio.Protocol):
    """See the module.

    Args:
        host: Answers its calls.

    Attributes:
        calls: The calls that run, by the number of their stream.
        peer: The address of the client.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.peer = ""
        self.calls: dict[int, Call] = {}
        self._fields: FieldReader[Head] = FieldReader(head_of, _FIELD_BYTES)
        self._rest = b""
        self._begun = self._settled = self._leaving = False
        self._block: bytearray | None = None  # fields that go on in the next frame
        self._block_of = (0, False)
        self._last = 0
        self._may_receive, self._unreported = _WINDOW, 0
        self._may_send, self._initial, self._largest = 65_535, 65_535, 16_384
        self._out: list[bytes] = []
        self._writable = True
        self._waiting: dict[int, Call] = {}  # calls that may not send all they have
        self._quiet_since = self._progress = time.monotonic()
        self._restless, self._second = 0, 0
        self._reads: dict[int, Callable[[int, int, bytes], None]] = {
            _Kind.DATA: self._data,
            _Kind.HEADERS: self._headers,
            _Kind.PRIORITY: self._priority,
            _Kind.RESET: self._was_reset,
            _Kind.SETTINGS: self._settings,
            _Kind.PUSH: self._forbidden,
            _Kind.PING: self._ping,
            _Kind.GO_AWAY: self._went_away,
            _Kind.WINDOW: self._window,
            _Kind.CONTINUATION: self._continuation,
        }

    # What asyncio tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.peer = str(peer[0]) if isinstance(peer, tuple) else str(peer or "")
        self._host.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._leaving = True
        calls, self.calls = list(self.calls.values()), {}
        self._waiting.clear()
        for call in calls:
            call.lost()
        self._host.closed(self)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self._rest:
            data = self._rest + data
        try:
            used = self._read(data)
        except (_Broken, FieldError) as exc:
            self._break(exc.code if isinstance(exc, _Broken) else _Code.COMPRESSION, str(exc))
            return
        if used:
            self._quiet_since = time.monotonic()
        self._rest = data[used:]

    def pause_writing(self) -> None:
        """See asyncio: a client that does not read its answers is not read either."""
        self._writable = False
        self._progress = time.monotonic()
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """See asyncio."""
        self._writable = True
        self._progress = time.monotonic()
        if self._transport is not None:
            self._transport.resume_reading()
        for call in list(self.calls.values()):
            call.may_send()

    # What the host and calls ask for.

    def leave(self) -> None:
        """Take no more calls; those that run go on."""
        if not self._leaving:
            self._leaving = True
            self._frame(_Kind.GO_AWAY, 0, 0, _NUMBER.pack(self._last) + _NUMBER.pack(_Code.NONE))

    def close(self) -> None:
        """Leave, and close the connection when everything is written."""
        self.leave()
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def look(self, now: float, *, head_s: float, idle_s: float, stalled_s: float) -> None:
        """End the connection if nothing happens on it that should.

        Args:
            now: The time.
            head_s: Seconds for the beginning of a connection, and for each frame.
            idle_s: Seconds without calls.
            stalled_s: Seconds in which a client takes nothing of what waits for it.
        """
        quiet_s = now - self._quiet_since
        if self._waiting or not self._writable:
            stands_still = now - self._progress > stalled_s
        else:
            stands_still = quiet_s > head_s and (self._is_amid or not self._settled)
        if stands_still:
            self.abort()
        elif not self.calls and quiet_s > idle_s:
            self.close()

    @property
    def _is_amid(self) -> bool:
        """Whether a part of a frame, or of header fields, is there."""
        return bool(self._rest) or self._block is not None

    def abort(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_drained(self) -> bool:
        """Whether the client takes what is sent."""
        return self._writable

    def fields(self, call: Call, block: bytes, *, last: bool = False) -> None:
        """Send header fields; the last ones end the call."""
        self._frame(_Kind.HEADERS, _END_HEADERS | (_END_STREAM if last else 0), call.number, block)
        if last:
            self._over(call)

    def content(self, call: Call, content: bytes) -> None:
        """Send content, now or as the client allows it."""
        call.to_send.append(memoryview(content))
        self._push(call)

    def widen(self, call: Call, by: int) -> None:
        """Let a call's client send so much more."""
        call.may_receive += by
        self._frame(_Kind.WINDOW, 0, call.number, _NUMBER.pack(by))

    # Frames that are written.

    def _frame(self, kind: int, flags: int, number: int, content: bytes | memoryview) -> None:
        size = len(content)
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(_FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, number))
        self._out.append(content)  # type: ignore[arg-type]

    def _flush(self) -> None:
        if self._out and self._transport is not None:
            out, self._out = self._out, []
            self._transport.write(b"".join(out))

    def _push(self, call: Call) -> None:
        """Send what a call has, as far as its client and the connection allow it."""
        while call.to_send:
            content = call.to_send[0]
            size = min(len(content), self._largest, self._may_send, call.may_send_bytes)
            if size <= 0 and len(content):
                if call.number not in self._waiting:
                    self._waiting[call.number] = call
                    self._progress = time.monotonic() if len(self._waiting) == 1 else self._progress
                return
            self._frame(_Kind.DATA, 0, call.number, content[:size])
            self._may_send -= size
            call.may_send_bytes -= size
            if size < len(content):
                call.to_send[0] = content[size:]
            else:
                call.to_send.popleft()
        if self._waiting.pop(call.number, None) is not None:
            self._progress = time.monotonic()
            call.may_send()
        if call.trailers is not None:
            self.fields(call, call.trailers, last=True)

    def _over(self, call: Call) -> None:
        """A call was answered."""
        if self.calls.pop(call.number, None) is not None and not call.ended:
            # It need not send the rest.
            self._frame(_Kind.RESET, 0, call.number, _NUMBER.pack(_Code.NONE))

    def _reset(self, number: int, code: _Code) -> None:
        self._frame(_Kind.RESET, 0, number, _NUMBER.pack(code))
        self._waiting.pop(number, None)
        call = self.calls.pop(number, None)
        if call is not None:
            call.lost()

    def _break(self, code: _Code, message: str) -> None:
        """The client cannot be understood: say so, and hang up."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._begun:
            told = _NUMBER.pack(self._last) + _NUMBER.pack(code) + message.encode()[:200]
            self._frame(_Kind.GO_AWAY, 0, 0, told)
            self._flush()
        else:
            self._out.clear()
            self._transport.write(_NOT_HTTP2)
        self._rest, self._leaving = b"", True
        self._transport.close()

    # Frames that are read.

    def _read(self, data: bytes) -> int:
        """Read all frames that are there; returns up to where."""
        at, end = 0, len(data)
        if not self._begun:
            if data[: len(_PREFACE)] != _PREFACE[:end]:
                raise _Broken(_Code.PROTOCOL, "no HTTP/2")
            if end < len(_PREFACE):
                return 0
            at = len(_PREFACE)
            self._begin()
        while end - at >= _HEAD_BYTES:
            high, low, kind, flags, number = _FRAME.unpack_from(data, at)
            size = high << 16 | low
            if size > _FRAME_BYTES:
                raise _Broken(_Code.FRAME_SIZE, f"a frame of {size} bytes")
            begin = at + _HEAD_BYTES
            if begin + size > end:
                break
            if not self._settled and kind != _Kind.SETTINGS:
                raise _Broken(_Code.PROTOCOL, "no settings")
            if self._block is not None and kind != _Kind.CONTINUATION:
                raise _Broken(_Code.PROTOCOL, "header fields that do not go on")
            at = begin + size
            read = self._reads.get(kind)
            if read is not None:  # others are for extensions
                read(number & _MOST_NUMBER, flags, data[begin:at])
            else:
                self._calm()
        return at

    def _begin(self) -> None:
        self._begun = True
        told = ((_MAX_STREAMS, _MOST_CALLS), (_INITIAL_WINDOW, _FIRST_WINDOW), (_MAX_FIELDS, _FIELD_BYTES))
        self._frame(_Kind.SETTINGS, 0, 0, b"".join(_SETTING.pack(*setting) for setting in told))
        self._frame(_Kind.WINDOW, 0, 0, _NUMBER.pack(_WINDOW - 65_535))

    def _data(self, number: int, flags: int, content: bytes) -> None:
        size = len(content)
        self._may_receive -= size
        if self._may_receive < 0:
            raise _Broken(_Code.FLOW_CONTROL, "more content than was allowed")
        self._unreported += size
        if self._unreported > _WINDOW // 2:
            self._frame(_Kind.WINDOW, 0, 0, _NUMBER.pack(self._unreported))
            self._may_receive += self._unreported
            self._unreported = 0
        call = self.calls.get(number)
        if call is None:
            self._check_used(number)
            return  # of a call that was answered before it had sent everything
        call.may_receive -= size
        if call.ended or call.may_receive < 0:
            self._reset(number, _Code.STREAM_CLOSED if call.ended else _Code.FLOW_CONTROL)
            return
        if flags & _PADDED:
            content = _unpadded(content)
        if not content and not flags & _END_STREAM:
            self._calm()
        call.received(content, ended=bool(flags & _END_STREAM))

    def _headers(self, number: int, flags: int, content: bytes) -> None:
        if flags & _PADDED:
            content = _unpadded(content)
        if flags & _PRIORITY:
            if len(content) < 5:
                raise _Broken(_Code.FRAME_SIZE, "a priority that is too short")
            content = content[5:]
        ended = bool(flags & _END_STREAM)
        if flags & _END_HEADERS:
            self._request(number, content, ended=ended)
        else:
            self._block, self._block_of = bytearray(content), (number, ended)

    def _continuation(self, number: int, flags: int, content: bytes) -> None:
        if self._block is None or number != self._block_of[0]:
            raise _Broken(_Code.PROTOCOL, "a continuation of nothing")
        self._calm()
        self._block += content
        if len(self._block) > _FIELD_BYTES:
            raise _Broken(_Code.CALM, f"header fields of more than {_FIELD_BYTES} bytes")
        if flags & _END_HEADERS:
            block, self._block = bytes(self._block), None
            self._request(number, block, ended=self._block_of[1])

    def _request(self, number: int, block: bytes, *, ended: bool) -> None:
        head = self._fields.read(block)
        call = self.calls.get(number)
        if call is not None:  # trailers, which gRPC's clients do not have
            if ended and not call.ended:
                call.received(b"", ended=True)
            else:
                self._reset(number, _Code.PROTOCOL)
            return
        if not number & 1:
            raise _Broken(_Code.PROTOCOL, "a stream that no client may open")
        if number <= self._last:
            self._reset(number, _Code.STREAM_CLOSED)
            return
        self._last = number
        if self._leaving or len(self.calls) >= _MOST_CALLS:
            self._calm()
            self._reset(number, _Code.REFUSED)
            return
        if head.is_malformed:
            self._calm()
            self._reset(number, _Code.PROTOCOL)
            return
        call = Call(self, number, head, self._initial, _FIRST_WINDOW, ended=ended)
        self.calls[number] = call
        self._host.begin(call)

    def _was_reset(self, number: int, flags: int, content: bytes) -> None:
        _check_size(content, 4)
        self._check_used(number)
        self._calm()
        self._waiting.pop(number, None)
        call = self.calls.pop(number, None)
        if call is not None:
            call.lost()

    def _settings(self, number: int, flags: int, content: bytes) -> None:
        if number or len(content) % _SETTING.size or (flags & _ACK and content):
            raise _Broken(_Code.FRAME_SIZE if not number else _Code.PROTOCOL, "settings that are none")
        self._settled = True
        if flags & _ACK:
            return
        self._calm()
        for name, value in _SETTING.iter_unpack(content):
            if name == _INITIAL_WINDOW:
                if value > _MOST_NUMBER:
                    raise _Broken(_Code.FLOW_CONTROL, "a window that is too large")
                change, self._initial = value - self._initial, value
                for call in self.calls.values():
                    call.may_send_bytes += change
            elif name == _MAX_FRAME:
                if not 16_384 <= value < 1 << 24:
                    raise _Broken(_Code.PROTOCOL, f"frames of {value} bytes")
                self._largest = value
        self._frame(_Kind.SETTINGS, _ACK, 0, b"")
        self._push_waiting()

    def _window(self, number: int, flags: int, content: bytes) -> None:
        _check_size(content, 4)
        by = _NUMBER.unpack(content)[0] & _MOST_NUMBER
        if not number:
            self._may_send += by
            if not by or self._may_send > _MOST_NUMBER:
                raise _Broken(_Code.FLOW_CONTROL if by else _Code.PROTOCOL, "no such window")
            self._push_waiting()
            return
        call = self.calls.get(number)
        if call is None:
            self._check_used(number)
            return
        call.may_send_bytes += by
        if not by or call.may_send_bytes > _MOST_NUMBER:
            self._reset(number, _Code.FLOW_CONTROL if by else _Code.PROTOCOL)
        elif number in self._waiting:
            self._push(call)

    def _push_waiting(self) -> None:
        for call in list(self._waiting.values()):
            self._push(call)

    def _ping(self, number: int, flags: int, content: bytes) -> None:
        _check_size(content, 8)
        if number:
            raise _Broken(_Code.PROTOCOL, "a ping on a stream")
        if not flags & _ACK:
            self._calm()
            self._frame(_Kind.PING, _ACK, 0, content)

    def _priority(self, number: int, flags: int, content: bytes) -> None:
        self._calm()
        _check_size(content, 5)

    def _went_away(self, number: int, flags: int, content: bytes) -> None:
        """The client opens no more calls, and will close the connection itself."""
        self._calm()

    def _forbidden(self, number: int, flags: int, content: bytes) -> None:
        raise _Broken(_Code.PROTOCOL, "a promise that no client may make")

    def _check_used(self, number: int) -> None:
        if not number & 1 or number > self._last:
            raise _Broken(_Code.PROTOCOL, "a stream that was not opened")

    def _calm(self) -> None:
        """Count what asks for nothing; a client that does little else is not worth the time."""
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._restless = second, 0
        self._restless += 1
        if self._restless > _MOST_RESTLESS:
            raise _Broken(_Code.CALM, "too many frames that ask for nothing")


def _check_size(content: bytes, size: int) -> None:
    if len(content) != size:
        raise _Broken(_Code.FRAME_SIZE, f"a frame of {len(content)} bytes where {size} belong")


def _unpadded(content: bytes) -> bytes:
    padding = content[0] if content else len(content)
    if padding >= len(content):
        raise _Broken(_Code.PROTOCOL, "more padding than content")
    return content[1 : len(content) - padding]
