"""The gRPC server beside the HTTP server: its port, its limits, its start and its end."""

from __future__ import annotations

import logging
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what clients do wrong is no news; must be set before grpc

import grpc

from kindler.errors import ConfigError
from kindler.serve.grpc_api.service import Service
from kindler.serve.predictions import Predictions
from kindler.serve.settings import Tls

_HEAD_BYTES = 64 << 10
_AHEAD_BYTES = 64 << 10  # what a call may send before it is known who sends it
_STREAMS = 100  # calls of one connection at a time; clients keep others waiting
_CONNECTIONS = 4096  # or a quarter of the files that the process may open
_THREADS, _NICE = ("event_engine", "lifeguard", "grpc_"), 10  # which start others of their own kind
_HEAD_S, _IDLE_S = 20, 300
_ALIVE_S, _SILENT_S = 60, 60  # without a word before a client is asked whether it is there, and after
_AGE_S, _LONGEST_S = 3600, 3600  # of a connection until it takes no more calls, and then of its last ones


class GrpcServer:
    """Answers gRPC on a port of its own, on the event loop of the HTTP server."""

    def __init__(self, predictions: Predictions, host: str, port: int, tls: Tls | None = None) -> None:
        self._service = Service(predictions)
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._tls = tls
        self._server: Any = None
        self.port = port

    async def start(self) -> None:
        """Begin to answer."""
        # A call whose client has gone is not worth a traceback; what goes wrong is logged by the service.
        logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: record.exc_info is None)
        self._server = grpc.aio.server(options=_options(self._service.most_bytes))
        self._server.add_generic_rpc_handlers((self._service,))
        try:
            if self._tls is None:
                self.port = self._server.add_insecure_port(self._address)
            else:
                self.port = self._server.add_secure_port(self._address, _credentials(self._tls))
        except RuntimeError as exc:
            raise ConfigError(f"cannot listen on {self._address} for gRPC: {exc}.") from exc
        await self._server.start()
        _let_others_go_first()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and let those that run end within so many seconds."""
        if self._server is not None:
            await self._server.stop(grace_s)


def _options(most_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", most_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", _HEAD_BYTES),
        ("grpc.so_reuseport", 0),  # two servers on one port would be a mistake
        ("grpc.max_concurrent_streams", _STREAMS),
        ("grpc.http.overload_protection", 0),  # it refuses calls of clients that keep to the limit
        ("grpc.max_allowed_incoming_connections", _most_connections()),
        ("grpc.http2.lookahead_bytes", _AHEAD_BYTES),
        ("grpc.http2.bdp_probe", 0),  # it would widen the windows of those who are not known yet
        ("grpc.server_handshake_timeout_ms", _HEAD_S * 1000),
        ("grpc.max_connection_idle_ms", _IDLE_S * 1000),
        ("grpc.max_connection_age_ms", _AGE_S * 1000),
        ("grpc.max_connection_age_grace_ms", _LONGEST_S * 1000),
        ("grpc.keepalive_time_ms", _ALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", _SILENT_S * 1000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 2),
    ]


def _let_others_go_first() -> None:
    """Where processors are short, HTTP and the models come before what strangers send to grpcio's threads."""
    for folder in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended, or the system has no such thing
            if (folder / "comm").read_text().startswith(_THREADS):
                os.setpriority(os.PRIO_PROCESS, int(folder.name), _NICE)


def _most_connections() -> int:
    return min(_CONNECTIONS, max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


def _credentials(tls: Tls) -> Any:
    roots = None if tls.client_ca is None else Path(tls.client_ca).read_bytes()
    return grpc.ssl_server_credentials(
        [(Path(tls.key).read_bytes(), Path(tls.certificate).read_bytes())],
        root_certificates=roots,
        require_client_auth=roots is not None,
    )
