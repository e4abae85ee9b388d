"""Authorization: the scopes that routes declare, and the API key of a request.

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
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kindler.errors import StoreError
from kindler.serve.http_errors import Problem
from kindler.serve.name_patterns import matching
from kindler.store.keys import Key, Keys, id_of

_OTHER = "admin"  # undeclared routes need the highest scope
_FRESH_S = 2.0
_PAUSE_S = 0.1  # between two reads of the keys for the sake of unknown ones, which anybody can send
_log = logging.getLogger("kindler.serve")
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Resource:
    """What a request is about.

    Attributes:
        bucket: The bucket.
        shelf: "models", "datasets" or "scripts".
        name: The name, without a version.
    """

    bucket: str
    shelf: str
    name: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request needs.

    Attributes:
        scopes: Any one of these; empty if no key is needed.
        shelf: The shelf of the name in its path; None if it has none.
        name: That name.
        filtered: Whether the route itself leaves out what a key is not for.
    """

    scopes: tuple[str, ...]
    shelf: str | None = None
    name: str = ""
    filtered: bool = False

    def resource(self, bucket: str) -> Resource | None:
        """What it is about, if it is about one thing."""
        return None if self.shelf is None else Resource(bucket, self.shelf, bare_name(self.name))


def needs(*scopes: str, on: str | None = None, filtered: bool = False) -> Callable[[_Endpoint], _Endpoint]:
    """Declare what a route needs.

    Args:
        *scopes: Any one of these is enough; without scopes it needs no key.
        on: The shelf of the `{name}` in its path.
        filtered: The route leaves out what the request's key is not for. A key for some buckets or names
            opens only routes that say one of the two.
    """

    def mark(endpoint: _Endpoint) -> _Endpoint:
        endpoint.kindler_needs = Wanted(scopes, on, filtered=filtered)  # type: ignore[attr-defined]
        return endpoint

    return mark


def needs_by_action(scopes: Mapping[str, str], *, on: str) -> Callable[[_Endpoint], _Endpoint]:
    """The same for a route whose path has an `action`."""

    def mark(endpoint: _Endpoint) -> _Endpoint:
        endpoint.kindler_actions = scopes  # type: ignore[attr-defined]
        endpoint.kindler_needs = Wanted((_OTHER,), on)  # type: ignore[attr-defined]
        return endpoint

    return mark


class Scopes:
    """What a request needs: what the route declares that will answer it.

    Predictions are not included: their protocols match their own paths.

    Args:
        routes: The routes, in the order in which they are tried.
        document: The path of the OpenAPI document, which needs no key.
    """

    def __init__(self, routes: Sequence[Any], document: str | None) -> None:
        self._routes = routes
        self._document = document

    def of(self, method: str, path: str) -> Wanted:
        """What is needed for this path."""
        if path == self._document and method in ("GET", "HEAD"):
            return Wanted(())
        for route in self._routes:
            match = route.path_regex.match(path)
            if match is None or method not in (route.methods or ()):
                continue
            wanted: Wanted = getattr(route.endpoint, "kindler_needs", Wanted((_OTHER,)))
            found = match.groupdict()
            actions: Mapping[str, str] | None = getattr(route.endpoint, "kindler_actions", None)
            scopes = wanted.scopes if actions is None else (actions.get(found["action"], _OTHER),)
            name = found.get("name", "")
            return Wanted(scopes, wanted.shelf if name else None, name, wanted.filtered)
        return Wanted(("read",) if method in ("GET", "HEAD") else (_OTHER,))


def bare_name(name: str) -> str:
    """A name without what says which version, which columns, and so on.

    >>> bare_name("net@prod^"), bare_name("iris[width]")
    ('net', 'iris')
    """
    return re.split(r"[\[{#@^]", name, maxsplit=1)[0]


def bucket_of(headers: Mapping[str, str], asked: str | None) -> str:
    """The bucket that a request means: by its header, or by `?bucket=`.

    Raises:
        Problem: 400: they differ, so that it could be taken for either.
    """
    said = headers.get("bucket")
    if said and asked and said != asked:
        raise Problem(400, f"the header names the bucket {said[:100]!r}, and the URL {asked[:100]!r}.")
    return said or asked or "default"


def covers(key: Key | None, resource: Resource) -> bool:
    """Whether a key is for something, whatever its scopes."""
    if key is None:
        return True
    if key.buckets and resource.bucket not in key.buckets:
        return False
    globs = key.names.get(resource.shelf, ())
    return not key.names or any(_matcher(glob)(resource.name) for glob in globs)


def check_datasets(key: Key | None, bucket: str, *names: str | None) -> None:
    """Check that a key may read the datasets that a request names beside its model.

    Raises:
        Problem: 403.
    """
    for name in names:
        if key is not None and name is not None:
            _check_scopes(key, ("read",))
            check_limits(key, Resource(bucket, "datasets", bare_name(name)))


@lru_cache(1024)
def _matcher(glob: str) -> Callable[[str], bool]:
    return matching(glob)


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
        self._is_closed = not local
        self._read_at = self._begun_at = -1e9
        self._reading: asyncio.Task[None] | None = None
        self._anew: asyncio.Task[None] | None = None

    async def admit(
        self, headers: Mapping[str, str], wanted: Wanted, resource: Resource | None = None
    ) -> Key | None:
        """Authorize a request; the key, or None if none is needed.

        Args:
            headers: The request's headers.
            wanted: What it needs.
            resource: What it is about, if it is about one thing.

        Raises:
            Problem: 401 for a missing, unknown or expired key; 403 for a key without the scope, or for
                other buckets or names.
        """
        if not wanted.scopes:
            return None
        if self._clock() - self._read_at > _FRESH_S:
            await self._look()
        if self.is_open:
            _check_host(headers.get("host", ""))
            if "origin" in headers and headers["origin"] not in self._origins:
                _check_origin(headers["origin"])
            return None
        token = _token(headers)
        if not token:
            hint = "" if self._known else " The store has no keys any more: `kindler keys add` makes one."
            raise Problem(
                401,
                f"missing API key; send 'Authorization: Bearer <key>'.{hint}",
                {"www-authenticate": "Bearer"},
            )
        name = id_of(token)
        if name and name not in self._known:  # perhaps a new key
            await self._look_anew()
        key = self._known.get(name)
        if key is None or not key.is_of(token) or key.is_over():
            raise Problem(401, "unknown or expired API key.", {"www-authenticate": "Bearer"})
        _check_scopes(key, wanted.scopes)
        if not wanted.filtered:
            check_limits(key, resource)
        return key

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return not self._is_closed

    async def _look(self) -> None:
        """Read the keys, once for all requests that ask meanwhile."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        await asyncio.shield(self._reading)

    async def _look_anew(self) -> None:
        """Read the keys as they are now or later, a few times a second whoever asks."""
        if self._anew is None:
            self._anew = asyncio.create_task(self._read_anew())
        await asyncio.shield(self._anew)

    async def _read_anew(self) -> None:
        await asyncio.sleep(self._begun_at + _PAUSE_S - self._clock())
        if self._reading is not None:
            await asyncio.wait([self._reading])  # it may be older than the key
        self._anew = None
        await self._look()

    async def _read(self) -> None:
        self._begun_at = self._clock()
        try:
            loop = asyncio.get_running_loop()
            keys, were_made = await loop.run_in_executor(self._executor, self._read_now)
            self._known = {key.id: key for key in keys}
            self._is_closed |= were_made
            self._read_at = self._clock()
        except StoreError as exc:
            if self._read_at < 0:
                raise
            # Loaded models can still answer clients whose keys were valid a moment ago.
            _log.warning("cannot read the API keys: %s", exc)
            self._read_at = self._clock()
        finally:
            self._reading = None

    def _read_now(self) -> tuple[list[Key], bool]:
        return self._keys.list(), self._keys.were_made()


def _check_scopes(key: Key, scopes: Sequence[str]) -> None:
    if not any(map(key.allows, scopes)):
        raise Problem(
            403,
            f"the API key {key.id} has the scopes {', '.join(key.scopes)}; this needs {' or '.join(scopes)}.",
        )


def check_limits(key: Key | None, resource: Resource | None) -> None:
    """Check that a key is for something.

    Args:
        key: The key; None if none is needed.
        resource: What the request is about; None if it is about more than one thing.

    Raises:
        Problem: 403.
    """
    if key is None or not key.is_limited:
        return
    if resource is None:
        raise Problem(403, f"the API key {key.id} is limited to some buckets or names; this is about all.")
    if not covers(key, resource):
        raise Problem(
            403,
            f"the API key {key.id} is not for {resource.name[:200]!r} of the {resource.shelf}"
            f" in the bucket {resource.bucket[:100]!r}.",
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
