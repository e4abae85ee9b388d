"""The gRPC server beside the HTTP server: its socket, its connections, its start and its end."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time

from kindler.serve.grpc_api.calls import Call
from kindler.serve.grpc_api.connection import Connection
from kindler.serve.grpc_api.service import Service
from kindler.serve.predict_app import Front
from kindler.serve.routes import Parts
from kindler.serve.tls import Tls

__all__ = ["GrpcServer"]

_MOST_CALLS = 1024  # of all clients at a time; others are refused
_EXHAUSTED = 8
_HEAD_S, _IDLE_S = 20.0, 900.0
_LOOK_S = 5.0  # between two looks at what does not move


class GrpcServer:
    """Answers gRPC on a port of its own, on the event loop of the HTTP server.

    Args:
        front: Answers predictions.
        parts: Answers the rest.
        listener: Where to listen.
        tls: The certificate, if connections are encrypted.

    Attributes:
        port: The port.
    """

    def __init__(self, front: Front, parts: Parts, listener: socket.socket, tls: Tls | None = None) -> None:
        self._front = front
        self._settings = parts.settings
        self._service = Service(front, parts)
        self._listener = listener
        self._tls = tls
        self._server: asyncio.AbstractServer | None = None
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.port = int(listener.getsockname()[1])

    async def start(self) -> None:
        """Begin to answer."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self),
            sock=self._listener,
            ssl=None if self._tls is None else _context(self._tls),
        )
        self._look()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and let those that run end within so many seconds."""
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.leave()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in self._tasks:
            task.cancel()
        for connection in list(self._connections):
            connection.close()

    def begin(self, call: Call) -> None:
        """See `Host`."""
        call.bodies = self._front.bodies
        if call.head.status:
            call.refuse()
            call.over()
        elif len(self._tasks) >= _MOST_CALLS:
            call.finish(_EXHAUSTED, f"the server is busy with {_MOST_CALLS} other calls.")
            call.over()
        else:
            call.task = asyncio.get_running_loop().create_task(self._service.answer(call))
            self._tasks.add(call.task)
            call.task.add_done_callback(self._tasks.discard)

    def opened(self, connection: Connection) -> None:
        """See `Host`."""
        self._connections.add(connection)

    def closed(self, connection: Connection) -> None:
        """See `Host`."""
        self._connections.discard(connection)

    def _look(self) -> None:
        now, timeout_s = time.monotonic(), self._settings.timeout_s
        for connection in list(self._connections):
            connection.look(now, head_s=min(_HEAD_S, timeout_s), idle_s=_IDLE_S, stalled_s=timeout_s)
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)


def _context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # HTTP/2 allows no less
    context.load_cert_chain(tls.certificate, tls.key)
    context.set_alpn_protocols(["h2"])
    if tls.client_ca is not None:
        context.load_verify_locations(tls.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
