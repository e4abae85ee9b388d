"""HTTP on the socket, as uvicorn reads it, with an end to what a client may send before its request begins.

uvicorn itself waits for ever for the rest of a head, and keeps all of it. What comes after the head,
and how long it may take, is for `predict_app.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD_BYTES = 64 << 10
_REASONS = {408: "Request Timeout", 431: "Request Header Fields Too Large"}


class GuardedTransport:
    """A transport that drops what is for a client that has gone; uvloop's raises before uvicorn knows it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()


class Wire(HttpToolsProtocol):
    """One connection.

    Attributes:
        head_s: Seconds until the head of a request must be there.
    """

    head_s = 20.0
    _in_head = True
    _head_bytes = 0
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(GuardedTransport(transport))  # type: ignore[arg-type]
        self._be_patient()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_over()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > _HEAD_BYTES:
            self._refuse(431, f"the head of a request may have {_HEAD_BYTES} bytes.")
        elif self._patience is None:
            self._be_patient()

    def on_message_begin(self) -> None:
        """The first bytes of a request are there."""
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head of a request is there."""
        self._head_is_over()
        super().on_headers_complete()

    def _be_patient(self) -> None:
        late = f"the head of the request did not arrive within {self.head_s:g} s."
        self._patience = self.loop.call_later(self.head_s, self._refuse, 408, late)

    def _head_is_over(self) -> None:
        self._in_head = False
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        if self._head_bytes:  # who has sent nothing is told nothing
            self.transport.write(
                f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: text/plain; charset=utf-8\r\n"
                f"content-length: {len(message)}\r\nconnection: close\r\n\r\n{message}".encode()
            )
        self.transport.close()
