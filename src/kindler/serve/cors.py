"""Which web pages of other origins may use the server: what browsers ask before, and are told afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from kindler.errors import ConfigError
from kindler.serve.requests import Reply

_METHODS = "GET, HEAD, POST, PUT, DELETE"
_TAKEN = (
    "accept, async, authorization, bucket, content-encoding, content-type, inference-header-content-length,"
    " traceparent, x-api-key, x-request-id, x-session-id"
)
_SHOWN = (
    "inference-header-content-length, location, retry-after, x-dtype, x-model-version, x-request-id, x-shape,"
    " x-version"
)
_SECONDS = "600"


class Cors:
    """The origins that are allowed.

    Args:
        origins: Such as "https://shop.example"; "*" is all. Keys are sent in headers and not as cookies, so
            no page can use a key that it does not have.

    Raises:
        ConfigError: One is no origin.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        for origin in origins:
            parts = urlsplit(origin)
            whole = (
                parts.scheme in ("http", "https")
                and parts.netloc
                and origin == f"{parts.scheme}://{parts.netloc}"
            )
            if origin != "*" and not whole:
                raise ConfigError(
                    f"{origin!r} is not an origin.\nHint: use scheme://host[:port] without a path, or '*'."
                )
        self._origins = frozenset(origins)

    def headers(self, origin: str | None) -> tuple[tuple[str, str], ...]:
        """What goes with an answer to a page of that origin; nothing if it is not allowed."""
        if not self._origins:
            return ()
        vary = () if "*" in self._origins else (("vary", "origin"),)
        if origin is None or not self._origins & {origin, "*"}:
            return vary
        allowed = "*" if "*" in self._origins else origin
        return (("access-control-allow-origin", allowed), ("access-control-expose-headers", _SHOWN), *vary)

    def preflight(self, method: str, headers: Mapping[str, str]) -> Reply | None:
        """The answer to a browser that asks whether it may; None if this is not that question."""
        asks = method == "OPTIONS" and "access-control-request-method" in headers and "origin" in headers
        if not self._origins or not asks:
            return None
        allowed = self._origins & {headers["origin"], "*"}
        told = (
            ("access-control-allow-methods", _METHODS),
            ("access-control-allow-headers", _TAKEN),
            ("access-control-max-age", _SECONDS),
        )
        return Reply(b"", headers=told if allowed else (), status=204 if allowed else 403)
