"""A running server: the socket, uvicorn, signals. What is served is in `app.py`."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

import uvicorn

from kindler.errors import ConfigError, MissingExtraError
from kindler.runtime.engine import without_trust
from kindler.serve.app import create_app
from kindler.serve.auth import is_loopback
from kindler.serve.http_protocol import HttpProtocol
from kindler.serve.memory import keep_tidy
from kindler.serve.predictions import Predictions
from kindler.serve.settings import ServeSettings, Tls
from kindler.storage import Store
from kindler.store.keys import Keys

if TYPE_CHECKING:
    from kindler.serve.grpc_api.server import GrpcServer

_BACKLOG = 2048
_SWITCH_S = 0.001
_SPARE_S = 1.0  # after the drain, for what is closed then
_FILES = 1 << 16  # that the process may have open, where the system lets it


class _Server(uvicorn.Server):
    """Starts and stops the gRPC server with itself."""

    def __init__(
        self, config: uvicorn.Config, started: Callable[[], None], drain_s: float, grpc: GrpcServer | None
    ) -> None:
        super().__init__(config)
        self._when_started = started
        self._drain_s = drain_s
        self._grpc = grpc
        self._tidy: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stop; at the end of the drain the process ends, whatever has not come back by then."""
        if not self.should_exit:
            forced = threading.Timer(self._drain_s + _SPARE_S, _force_exit)
            forced.daemon = True
            forced.start()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._grpc is not None:
            await self._grpc.start()
        await super().startup(sockets)
        if self.started:
            self._when_started()
            self._tidy = asyncio.create_task(keep_tidy())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tidy is not None:
            self._tidy.cancel()
        stopping = [] if self._grpc is None else [self._grpc.stop(self._drain_s)]
        await asyncio.gather(*stopping, super().shutdown(sockets))


def serve(
    url: str | None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    broker: str | None = None,
    settings: ServeSettings | None = None,
    grpc_port: int | None = None,
    tls: Tls | None = None,
    say: Callable[[str], None] | None = None,
) -> None:
    """Serve a store until SIGINT or SIGTERM; running requests finish first.

    Args:
        url: The store; None uses `KINDLER_STORE`, or the user's own.
        host: The address to listen on. One that other machines can reach requires keys in the store.
        port: The port; 0 picks a free one.
        broker: The broker of the store's runtime; None uses `KINDLER_BROKER`, or workers on this machine.
        settings: The limits.
        grpc_port: The port for gRPC, on the same address; 0 picks a free one, None disables gRPC.
        tls: The certificate; None serves plain HTTP.
        say: Called with a line that says where the server listens, and with another for gRPC.

    Raises:
        ConfigError: The server cannot listen on the address, or the address requires keys.
        MissingExtraError: gRPC is not installed.
    """
    settings = settings or ServeSettings()
    _allow_files()
    storage = Store(url, broker=broker if settings.trusted else without_trust(broker))
    local = is_loopback(host)
    if not local:
        _require_keys(storage.store.url, host)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as exc:
        raise ConfigError(f"cannot listen on {host}:{port}: {exc}.") from exc
    shown = f"[{host}]" if ":" in host else host
    where = f"{'http' if tls is None else 'https'}://{shown}:{listener.getsockname()[1]}"
    app = create_app(storage, settings, local=local)
    grpc = None if grpc_port is None else _grpc(app.predictions, host, grpc_port, tls)
    encryption: dict[str, Any] = {}
    if tls is not None:
        encryption = {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key, "ssl_ca_certs": tls.client_ca}
        encryption["ssl_cert_reqs"] = ssl.CERT_NONE if tls.client_ca is None else ssl.CERT_REQUIRED
    config = uvicorn.Config(
        app,
        http=type("HttpProtocol", (HttpProtocol,), {"head_s": min(HttpProtocol.head_s, settings.timeout_s)}),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the access log has who connected
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        timeout_keep_alive=75,
        **encryption,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    # uvicorn sends itself the signal again once it has stopped; by then all is done.
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: None) for number in signals}
    # A model's thread that waits for Python's lock would wait five times as long while requests are decoded.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:

        def started() -> None:
            # What is there now stays. Going through it for garbage would stop every request for 0.1 s.
            gc.collect()
            gc.freeze()
            if say is not None:
                say(f"Serving {storage.store!r} at {where}")
                if grpc is not None:
                    say(f"Serving gRPC at {shown}:{grpc.port}")

        _Server(config, started, settings.drain_s, grpc).run([listener])
    finally:
        listener.close()
        gc.unfreeze()
        sys.setswitchinterval(interval)
        for number, handler in before.items():
            signal.signal(number, handler)
        storage.close()


def _grpc(predictions: Predictions, host: str, port: int, tls: Tls | None) -> GrpcServer:
    try:
        from kindler.serve.grpc_api.server import GrpcServer
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in ("google", "grpc", "grpc_health", "grpc_reflection"):
            raise
        package = {"google": "protobuf", "grpc": "grpcio"}.get(exc.name or "", exc.name)
        raise MissingExtraError(what="serving gRPC", package=str(package), extra="grpc") from exc
    return GrpcServer(predictions, host, port, tls)


def _allow_files() -> None:
    """Let the process open as many files and connections as it may: the usual 1,024 are soon taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _force_exit() -> None:
    logging.getLogger("kindler.serve").warning("forcing shutdown: calls still running after the drain period")
    os._exit(0)


def _require_keys(url: str, host: str) -> None:
    with closing(Keys(url)) as keys:
        if not keys.list():
            raise ConfigError(
                f"the store has no API keys, so it cannot be served on {host}, where others could reach it.\n"
                "Hint: create one with `kindler keys add --scope predict`, or listen on 127.0.0.1."
            )
