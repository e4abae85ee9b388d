"""An HTTP/1.1 connection: uvicorn's, with a limit on the head of a request, in bytes and in seconds.

Whoever sends the head slowly, or never ends it, would otherwise hold a connection for nothing. What comes
after the head, and how long it may take, is for `bodies.py`.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEAD_BYTES = 64 << 10


class GuardedTransport:
    """A transport that drops what is for a client that has gone; uvloop's raises before uvicorn knows it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        if name in ("write", "pause_reading", "resume_reading") and self._transport.is_closing():
            return lambda *_: None
        return getattr(self._transport, name)


class HttpProtocol(HttpToolsProtocol):
    """One connection; `head_s` is the seconds until the head of a request must be there."""

    head_s = 20.0
    _in_head = True
    _head_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(GuardedTransport(transport))  # type: ignore[arg-type]
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._reject(431, f"the head of a request is limited to {_MAX_HEAD_BYTES} bytes.")
        elif self._timer is None:
            self._start_timer()

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def _start_timer(self) -> None:
        late = f"the head of the request did not arrive within {self.head_s:g} s."
        self._timer = self.loop.call_later(self.head_s, self._reject, 408, late)

    def _end_head(self) -> None:
        self._in_head = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _reject(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        if self._head_bytes:  # who has sent nothing is told nothing
            self.transport.write(
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
                "content-type: text/plain; charset=utf-8\r\n"
                f"content-length: {len(message)}\r\nconnection: close\r\n\r\n{message}".encode()
            )
        self.transport.close()
