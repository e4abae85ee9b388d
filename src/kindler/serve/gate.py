"""Who may do what: a scope for every method and path, and the key of a request.

A server that listens on this machine alone and has no keys lets everybody in, but only under a name of this
machine, and no page of another site, which a browser on this machine would let reach it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import lru_cache
from urllib.parse import urlsplit

from kindler.errors import StoreError
from kindler.serve.keys import Key, Keys, id_of
from kindler.serve.problems import Problem

__all__ = ["Gate", "is_loopback", "needed"]

_OPEN = frozenset(
    ("/", "/healthz", "/readyz", "/ping", "/health", "/version", "/openapi.json", "/favicon.ico",
     "/v2", "/v2/health/live", "/v2/health/ready", "/api/v1/ping")
)  # fmt: skip
_STATIC = "/static/"
_WRITES = re.compile(r"/api/v1/(dataset/.+|model/.+/(fit|partial_fit))")
_RUNS = re.compile(r"/api/v1/(script/.+/run|model/.+/score)")
_TASKS = "/api/v1/task/"  # an id is known to whoever began it
_READS = frozenset({"/v2/repository/index"})
_FRESH_S = 2.0
_log = logging.getLogger("kindler.serve")


def needed(method: str, path: str) -> str | None:
    """The scope that a request needs; None if it needs none. What is not known needs the highest.

    Predictions are not among these: their protocols know their own paths.

    >>> needed("GET", "/api/v1/models"), needed("PUT", "/api/v1/dataset/x"), needed("GET", "/healthz")
    ('read', 'write', None)
    """
    if path.startswith(_TASKS):
        return "predict"
    if method in ("GET", "HEAD"):
        return None if path in _OPEN or path.startswith(_STATIC) else "read"
    if method == "POST" and path in _READS:
        return "read"
    if method in ("PUT", "DELETE") and _WRITES.fullmatch(path):
        return "write"
    if method in ("PUT", "POST") and _RUNS.fullmatch(path):
        return "predict"
    return "admin"


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is this machine's own."""
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
        local: Whether the server can be reached from this machine alone.
        clock: Seconds that only grow.
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

    async def admit(self, headers: Mapping[str, str], scope: str | None) -> Key | None:
        """The key of a request, if it has one and needs one.

        Raises:
            Problem: 401: it needs a key, or has a wrong one. 403: its key is not for this.
        """
        if scope is None:
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
                401, "a key is needed, as 'Authorization: Bearer <key>'.", {"www-authenticate": "Bearer"}
            )
        name = id_of(token)
        for _ in range(2):  # made just now, perhaps; a look that others have begun may be older than that
            if name and name not in self._known:
                await self._look()
        key = self._known.get(name)
        if key is None or not key.is_of(token) or key.is_over():
            raise Problem(401, "the key is not known, or its time is over.", {"www-authenticate": "Bearer"})
        if not key.allows(scope):
            raise Problem(403, f"the key {key.id} is for {', '.join(key.scopes)}, and this needs {scope}.")
        return key

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return self._local and not self._known

    async def _look(self) -> None:
        """Read the keys; one time for all who ask for it meanwhile."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        await asyncio.shield(self._reading)

    async def _read(self) -> None:
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._executor, self._keys.list)
            self._known = {key.id: key for key in found}
            self._read_at = self._clock()
        except StoreError as exc:
            if self._read_at < 0:
                raise
            # Models in memory can still answer those whose keys were good a moment ago.
            _log.warning("the keys cannot be read: %s", exc)
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
    """Whether a name with or without a port is this machine's own; none at all is."""
    name = host if host.startswith("[") and host.endswith("]") else host.rsplit(":", 1)[0]
    return not host or is_loopback(name)


def _check_host(host: str) -> None:
    if not _is_of_this_machine(host):
        raise Problem(
            403,
            f"a server without keys answers under names of its own machine only, not as {host[:100]!r}.",
        )


def _check_origin(origin: str) -> None:
    try:
        host = urlsplit(origin).netloc
    except ValueError:
        host = ""
    if not host or not _is_of_this_machine(host):
        raise Problem(403, f"a server without keys does not answer pages of {origin[:100]!r}.")
