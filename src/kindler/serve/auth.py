"""Authorization: what each route requires, and what the API key of a request allows.

A server on a loopback address is open while its store has never had keys, but only under a loopback host
name, and not for pages of other sites, which a browser on this machine could otherwise send to it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kindler.errors import StoreError
from kindler.serve.http_errors import Problem
from kindler.store.keys import Key, Keys, id_of
from kindler.store.names import matches

_HIGHEST = "admin"  # undeclared routes and actions need it
_FRESH_S = 2.0
_PAUSE_S = 0.1  # between two reads of the keys for the sake of unknown ones, which anybody can send
_log = logging.getLogger("kindler.serve")
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a request needs.

    Attributes:
        scopes: Any one of these; empty if no key is needed.
        shelf: The shelf of the name in its path; None if it has none.
        filtered: The endpoint itself leaves out what a key does not cover. A key for some buckets or names
            opens only endpoints that have a shelf or are filtered.
        actions: The scope of each `action` in its path.
    """

    scopes: tuple[str, ...]
    shelf: str | None = None
    filtered: bool = False
    actions: Mapping[str, str] = field(default_factory=dict)

    def scopes_for(self, path: Mapping[str, str]) -> tuple[str, ...]:
        """The scopes, given the parameters of the path."""
        return (self.actions.get(path["action"], _HIGHEST),) if self.actions else self.scopes


UNDECLARED = Requirement((_HIGHEST,))


def needs(
    *scopes: str, on: str | None = None, filtered: bool = False, actions: Mapping[str, str] | None = None
) -> Callable[[_Endpoint], _Endpoint]:
    """Declare what an endpoint requires: see `Requirement`."""

    def mark(endpoint: _Endpoint) -> _Endpoint:
        endpoint.kindler_needs = Requirement(scopes, on, filtered, actions or {})  # type: ignore[attr-defined]
        return endpoint

    return mark


@dataclass(frozen=True, slots=True)
class Access:
    """An authorized request: its key, which is None if none was needed, and its bucket."""

    key: Key | None
    bucket: str

    @property
    def key_id(self) -> str | None:
        return None if self.key is None else self.key.id

    def covers(self, shelf: str, name: str) -> bool:
        """Whether the key is for a name, whatever its scopes."""
        key = self.key
        if key is None:
            return True
        if key.buckets and self.bucket not in key.buckets:
            return False
        return not key.names or any(matches(glob, name) for glob in key.names.get(shelf, ()))

    def check(self, shelf: str, name: str) -> None:
        """Raise a 403 Problem unless the key is for a name; what says which version of it is ignored."""
        name = bare_name(name)
        if self.key is not None and self.key.is_limited and not self.covers(shelf, name):
            raise Problem(
                403,
                f"the API key {self.key.id} has no access to {shelf}/{name[:200]} in the bucket"
                f" {self.bucket[:100]!r}.",
            )

    def check_datasets(self, *names: str | None) -> None:
        """Raise a 403 Problem unless the key may read the datasets that a request names with its model."""
        for name in names:
            if self.key is not None and name is not None:
                _check_scopes(self.key, ("read",))
                self.check("datasets", name)


def bare_name(name: str) -> str:
    """A name without what says which version, which columns, and so on.

    >>> bare_name("net@prod^"), bare_name("iris[width]")
    ('net', 'iris')
    """
    return re.split(r"[\[{#@^]", name, maxsplit=1)[0]


def bucket_of(headers: Mapping[str, str], in_url: str | None) -> str:
    """The bucket of a request, by its header or by `?bucket=`; a 400 Problem if these differ."""
    in_header = headers.get("bucket")
    if in_header and in_url and in_header != in_url:
        raise Problem(400, f"the header names the bucket {in_header[:100]!r}, and the URL {in_url[:100]!r}.")
    return in_header or in_url or "default"


def is_loopback(host: str) -> bool:
    """Whether an address is a loopback address."""
    name = host.strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Authorizer:
    """Checks the keys of requests against those of the store.

    Args:
        keys: The keys of the store.
        executor: Where they are read.
        local: Whether the server listens on a loopback address.
        origins: Web origins whose pages may use a server without keys.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        keys: Keys,
        executor: Executor,
        *,
        local: bool,
        origins: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._executor = executor
        self._origins = frozenset(origins) - {"*"}
        self._clock = clock
        self._known: dict[str, Key] = {}
        self.is_open = local
        self._read_at = self._started_at = -1e9
        self._reading: asyncio.Task[None] | None = None
        self._rereading: asyncio.Task[None] | None = None

    async def authorize(
        self, headers: Mapping[str, str], bucket: str, scopes: Sequence[str], *, limited: bool = False
    ) -> Access:
        """Check the key of a request.

        Args:
            headers: The request's headers, with names in lower case.
            bucket: Its bucket.
            scopes: Any one of these is needed; without scopes no key is.
            limited: Whether the caller checks what the key covers. Otherwise it must cover everything.

        Raises:
            Problem: 401 for a missing, unknown or expired key; 403 for one that does not allow this.
        """
        if not scopes:
            return Access(None, bucket)
        if self._clock() - self._read_at > _FRESH_S:
            await self._read_once()
        if self.is_open:
            _check_host(headers.get("host", ""))
            if "origin" in headers and headers["origin"] not in self._origins:
                _check_origin(headers["origin"])
            return Access(None, bucket)
        token = _token(headers)
        if not token:
            hint = "" if self._known else " The store has no keys any more: `kindler keys add` makes one."
            raise Problem(
                401,
                f"missing API key; send 'Authorization: Bearer <key>'.{hint}",
                {"www-authenticate": "Bearer"},
            )
        key = await self._find(id_of(token))
        if key is None or not key.is_of(token) or key.is_over():
            raise Problem(401, "unknown or expired API key.", {"www-authenticate": "Bearer"})
        _check_scopes(key, scopes)
        if key.is_limited and not limited:
            raise Problem(
                403, f"the API key {key.id} is restricted; this endpoint needs an unrestricted key."
            )
        return Access(key, bucket)

    async def _find(self, key_id: str) -> Key | None:
        """A key by its id; one that is not known is looked for in the store, as it may be new."""
        if key_id and key_id not in self._known:
            if self._rereading is None:
                self._rereading = asyncio.create_task(self._read_again())
            await asyncio.shield(self._rereading)
        return self._known.get(key_id)

    async def _read_once(self) -> None:
        """Read the keys, once for all requests that ask meanwhile."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        await asyncio.shield(self._reading)

    async def _read_again(self) -> None:
        """Read the keys as they are now or later, a few times a second whoever asks."""
        await asyncio.sleep(self._started_at + _PAUSE_S - self._clock())
        if self._reading is not None:
            await asyncio.wait([self._reading])  # it may be older than the key
        self._rereading = None
        await self._read_once()

    async def _read(self) -> None:
        self._started_at = self._clock()
        try:
            loop = asyncio.get_running_loop()
            keys, were_made = await loop.run_in_executor(
                self._executor, lambda: (self._keys.list(), self._keys.were_made())
            )
            self._known = {key.id: key for key in keys}
            self.is_open &= not were_made
            self._read_at = self._clock()
        except StoreError as exc:
            if self._read_at < 0:
                raise
            # Loaded models can still answer clients whose keys were valid a moment ago.
            _log.warning("cannot read the API keys: %s", exc)
            self._read_at = self._clock()
        finally:
            self._reading = None


def _check_scopes(key: Key, scopes: Sequence[str]) -> None:
    if not any(map(key.allows, scopes)):
        raise Problem(
            403,
            f"the API key {key.id} has the scopes {', '.join(key.scopes)}; this needs {' or '.join(scopes)}.",
        )


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
            403, f"a server without API keys only answers on a loopback host name, not {host[:100]!r}."
        )


def _check_origin(origin: str) -> None:
    try:
        host = urlsplit(origin).netloc
    except ValueError:
        host = ""
    if not host or not _is_of_this_machine(host):
        raise Problem(403, f"a server without API keys does not answer requests from {origin[:100]!r}.")
