"""The gRPC server beside the HTTP server: its port, its limits, its start and its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from kindler.errors import ConfigError
from kindler.serve.grpc_api.service import Admission, handlers
from kindler.serve.predict_app import Front
from kindler.serve.routes import Parts
from kindler.serve.tls import Tls

__all__ = ["GrpcServer"]

_MOST_CALLS = 1024  # at a time; others are refused
_HEAD_BYTES = 64 << 10
_SPARE_BYTES = 1 << 20  # of a message around its tensors


class GrpcServer:
    """Answers gRPC on a port of its own, on the event loop of the HTTP server.

    Args:
        front: Answers predictions.
        parts: Answers the rest.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        tls: The certificate, if connections are encrypted.
    """

    def __init__(self, front: Front, parts: Parts, host: str, port: int, tls: Tls | None = None) -> None:
        self._front = front
        self._parts = parts
        self._host = f"[{host}]" if ":" in host else host
        self._wanted = port
        self._tls = tls
        self._server: Any = None
        self.port = 0

    async def start(self) -> None:
        """Begin to answer.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        most = self._parts.settings.body_bytes + _SPARE_BYTES
        self._server = grpc.aio.server(
            interceptors=(Admission(self._front),),
            maximum_concurrent_rpcs=_MOST_CALLS,
            options=(
                ("grpc.max_receive_message_length", most),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", _HEAD_BYTES),
                ("grpc.so_reuseport", 0),  # two servers on one port would be a mistake
            ),
        )
        self._server.add_generic_rpc_handlers(handlers(self._front, self._parts))
        address = f"{self._host}:{self._wanted}"
        try:
            if self._tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, _credentials(self._tls))
        except RuntimeError as exc:
            raise ConfigError(f"cannot listen on {address}: {exc}.") from exc
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and let those that run end within so many seconds."""
        if self._server is not None:
            await self._server.stop(grace_s)


def _credentials(tls: Tls) -> Any:
    roots = None if tls.client_ca is None else Path(tls.client_ca).read_bytes()
    return grpc.ssl_server_credentials(
        [(tls.key_pem(), Path(tls.certificate).read_bytes())],
        root_certificates=roots,
        require_client_auth=roots is not None,
    )
