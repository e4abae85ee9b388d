"""Authorization: the scopes that routes declare, and the API key of a request.

A server on a loopback address without keys is open, but only under a loopback host name, and not for pages of
other sites, which a browser on this machine could otherwise send to it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kindler.errors import StoreError
from kindler.serve.http_errors import Problem
from kindler.store.keys import Key, Keys, id_of

__all__ = ["Gate", "Scopes", "is_loopback", "needs", "needs_by_action"]

_OTHER = "admin"  # undeclared routes need the highest scope
_FRESH_S = 2.0
_log = logging.getLogger("kindler.serve")
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])


def needs(*scopes: str) -> Callable[[_Endpoint], _Endpoint]:
    """Declare the scopes of a route, any one of which is enough; without scopes it needs no key."""

    def mark(endpoint: _Endpoint) -> _Endpoint:
        endpoint.kindler_scopes = scopes  # type: ignore[attr-defined]
        return endpoint

    return mark


def needs_by_action(scopes: Mapping[str, str]) -> Callable[[_Endpoint], _Endpoint]:
    """The same for a route whose path has an `action`."""

    def mark(endpoint: _Endpoint) -> _Endpoint:
        endpoint.kindler_actions = scopes  # type: ignore[attr-defined]
        return endpoint

    return mark


class Scopes:
    """The scopes that a request needs: those of the route that will answer it.

    Predictions are not included: their protocols match their own paths.

    Args:
        routes: The routes, in the order in which they are tried.
        document: The path of the OpenAPI document, which needs no key.
    """

    def __init__(self, routes: Sequence[Any], document: str | None) -> None:
        self._routes = routes
        self._document = document

    def of(self, method: str, path: str) -> tuple[str, ...]:
        """Any one of these scopes is enough; empty if no key is needed."""
        if path == self._document and method in ("GET", "HEAD"):
            return ()
        for route in self._routes:
            match = route.path_regex.match(path)
            if match is None or method not in (route.methods or ()):
                continue
            actions: Mapping[str, str] | None = getattr(route.endpoint, "kindler_actions", None)
            if actions is not None:
                return (actions.get(match["action"], _OTHER),)
            scopes: tuple[str, ...] = getattr(route.endpoint, "kindler_scopes", (_OTHER,))
            return scopes
        return ("read",) if method in ("GET", "HEAD") else (_OTHER,)


def is_loopback(host: str) -> bool:
    """Whether an address is a loopback address."""
    name = host.strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Gate:
    """Checks keys.

    Args:
        keys: The keys of the store.
        executor: Where they are read.
        local: Whether the server listens on a loopback address.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self, keys: Keys, executor: Executor, *, local: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys = keys
        self._executor = executor
        self._local = local
        self._clock = clock
        self._known: dict[str, Key] = {}
        self._read_at = -1e9
        self._reading: asyncio.Task[None] | None = None

    async def admit(self, headers: Mapping[str, str], scopes: Sequence[str]) -> Key | None:
        """Authorize a request; the key, or None if none is needed.

        Args:
            headers: The request's headers.
            scopes: The key must have one of these; empty if no key is needed.

        Raises:
            Problem: 401 for a missing, unknown or expired key; 403 for a key without the scope.
        """
        if not scopes:
            return None
        if self._clock() - self._read_at > _FRESH_S:
            await self._look()
        if self._local and not self._known:
            _check_host(headers.get("host", ""))
            if "origin" in headers:
                _check_origin(headers["origin"])
            return None
        token = _token(headers)
        if not token:
            raise Problem(
                401, "missing API key; send 'Authorization: Bearer <key>'.", {"www-authenticate": "Bearer"}
            )
        name = id_of(token)
        for _ in range(2):  # perhaps a new key; a read that others started may be older than it
            if name and name not in self._known:
                await self._look()
        key = self._known.get(name)
        if key is None or not key.is_of(token) or key.is_over():
            raise Problem(401, "unknown or expired API key.", {"www-authenticate": "Bearer"})
        if not any(map(key.allows, scopes)):
            wanted = " or ".join(scopes)
            raise Problem(
                403, f"the API key {key.id} has the scopes {', '.join(key.scopes)}; this needs {wanted}."
            )
        return key

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return self._local and not self._known

    async def _look(self) -> None:
        """Read the keys, once for all requests that ask meanwhile."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        await asyncio.shield(self._reading)

    async def _read(self) -> None:
        try:
            keys = await asyncio.get_running_loop().run_in_executor(self._executor, self._keys.list)
            self._known = {key.id: key for key in keys}
            self._read_at = self._clock()
        except StoreError as exc:
            if self._read_at < 0:
                raise
            # Loaded models can still answer clients whose keys were valid a moment ago.
            _log.warning("cannot read the API keys: %s", exc)
            self._read_at = self._clock()
        finally:
            self._reading = None


def _token(headers: Mapping[str, str]) -> str:
    if "x-api-key" in headers:
        return headers["x-api-key"].strip()
    kind, _, rest = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return rest.strip()
    if kind.lower() == "apikey":  # omega|ml's clients: "ApiKey user:key"
        return rest.strip().rpartition(":")[2]
    return ""


@lru_cache(256)
def _is_of_this_machine(host: str) -> bool:
    """Whether a host name, with or without a port, is a loopback name; an empty one is."""
    name = host if host.startswith("[") and host.endswith("]") else host.rsplit(":", 1)[0]
    return not host or is_loopback(name)


def _check_host(host: str) -> None:
    if not _is_of_this_machine(host):
        raise Problem(
            403,
            f"a server without API keys only answers on a loopback host name, not {host[:100]!r}.",
        )


def _check_origin(origin: str) -> None:
    try:
        host = urlsplit(origin).netloc
    except ValueError:
        host = ""
    if not host or not _is_of_this_machine(host):
        raise Problem(403, f"a server without API keys does not answer requests from {origin[:100]!r}.")
