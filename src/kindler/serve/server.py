"""A running server: the socket, uvicorn, signals. What is served is in `app.py`."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import uvicorn

from kindler.errors import ConfigError
from kindler.omega import Omega
from kindler.serve.app import create_app
from kindler.serve.auth import is_loopback
from kindler.serve.http_protocol import Wire
from kindler.serve.settings import ServeSettings
from kindler.store.keys import Keys

__all__ = ["serve"]

_BACKLOG = 2048
_SWITCH_S = 0.001
_SPARE_S = 1.0  # after the drain, for what is closed then


class _Server(uvicorn.Server):
    """Says where it listens when it does."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None], drain_s: float) -> None:
        super().__init__(config)
        self._when_started = started
        self._drain_s = drain_s

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stop; at the end of the drain the process ends, whatever has not come back by then."""
        if not self.should_exit:
            end = threading.Timer(self._drain_s + _SPARE_S, _end)
            end.daemon = True
            end.start()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self.started:
            self._when_started()


def serve(
    url: str | None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    broker: str | None = None,
    settings: ServeSettings | None = None,
    say: Callable[[str], None] | None = None,
) -> None:
    """Serve a store until SIGINT or SIGTERM; requests that run are finished first.

    Args:
        url: The store; None takes `KINDLER_STORE`, or the user's own.
        host: The address to listen on. One beyond this machine needs keys in the store.
        port: The port; 0 takes a free one.
        broker: The broker of the store's runtime; None takes `KINDLER_BROKER`, or workers of this machine.
        settings: The limits.
        say: Is told, in a line, where the server listens.

    Raises:
        ConfigError: The address cannot be listened on, or should not without keys.
    """
    settings = settings or ServeSettings()
    omega = Omega(url, broker=broker)
    local = is_loopback(host)
    if not local:
        _require_keys(omega.store.url, host)
    listener = _listening(host, port)
    shown = f"[{host}]" if ":" in host else host
    where = f"http://{shown}:{listener.getsockname()[1]}"
    app = create_app(omega, settings, local=local)
    config = uvicorn.Config(
        app,
        http=type("Wire", (Wire,), {"head_s": min(Wire.head_s, settings.timeout_s)}),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # whom a proxy speaks for is of no interest here
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        timeout_keep_alive=75,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    # uvicorn sends itself the signal again once it has stopped; by then all is done.
    before = {number: signal.signal(number, _ended) for number in (signal.SIGINT, signal.SIGTERM)}
    # A model's thread that waits for Python's lock would wait five times as long while requests are decoded.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        announcement = f"Kindler serves {omega.store!r} at {where}"
        _Server(config, lambda: say(announcement) if say else None, settings.drain_s).run([listener])
    finally:
        listener.close()
        sys.setswitchinterval(interval)
        for number, handler in before.items():
            signal.signal(number, handler)
        omega.close()


def _end() -> None:
    logging.getLogger("kindler.serve").warning("some calls did not come back in time; the server ends now")
    os._exit(0)


def _ended(number: int, frame: object) -> None:
    """The server stopped because of this signal, which is what it was for."""


def _require_keys(url: str, host: str) -> None:
    keys = Keys(url)
    try:
        if not keys.list():
            raise ConfigError(
                f"the store has no API keys, so it cannot be served on {host}, where others could reach it.\n"
                "Hint: create one with `kindler keys add --scope predict`, or listen on 127.0.0.1."
            )
    finally:
        keys.close()


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as exc:
        raise ConfigError(f"cannot listen on {host}:{port}: {exc}.") from exc
