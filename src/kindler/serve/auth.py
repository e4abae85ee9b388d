"""Authorization: what the API key of a request allows.

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
from urllib.parse import urlsplit

from kindler.errors import StoreError
from kindler.serve.http_errors import Problem
from kindler.serve.request_log import Entry
from kindler.store.keys import Key, Keys, id_of
from kindler.store.names import matches

_FRESH_S = 2.0
_MOST_UNKNOWN, _LONGEST_ID = 10_000, 64  # ids that are remembered, as anybody can send them
_log = logging.getLogger("kindler.serve")


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
        if not self.covers(shelf, name):
            where = f"{shelf}/{name[:200]} in the bucket {self.bucket[:100]!r}"
            raise Problem(403, f"the API key {self.key_id} has no access to {where}.")

    def require(self, *scopes: str) -> None:
        """Raise a 403 Problem unless the key has one of these scopes."""
        if self.key is not None and not any(map(self.key.allows, scopes)):
            own, wanted = ", ".join(self.key.scopes), " or ".join(scopes)
            raise Problem(403, f"the API key {self.key.id} has the scopes {own}; this needs {wanted}.")

    def check_datasets(self, *names: str | None) -> None:
        """Raise a 403 Problem unless the key may read the datasets that a request names with its model."""
        for name in names:
            if name is not None:
                self.require("read")
                self.check("datasets", name)


def bare_name(name: str) -> str:
    """A name without what says which version, which columns, and so on.

    >>> bare_name("net@prod^"), bare_name("iris[width]")
    ('net', 'iris')
    """
    return re.split(r"[\[{#@^]", name, maxsplit=1)[0]


def _bucket(headers: Mapping[str, str], in_url: str | None) -> str:
    in_header = headers.get("bucket")
    if in_header and in_url and in_header != in_url:
        raise Problem(400, f"the header names the bucket {in_header[:100]!r}, and the URL {in_url[:100]!r}.")
    return in_header or in_url or "default"


def is_loopback(host: str) -> bool:
    name = host.strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Authorizer:
    """Checks the keys of requests against those of the store, which the executor reads.

    Args:
        local: Whether the server listens on a loopback address.
        origins: Web origins whose pages may use a server without keys.
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
        self._unknown: set[str] = set()  # since the keys were read
        self.is_open = local
        self._read_at = -1e9
        self._reading, self._finding = asyncio.Lock(), asyncio.Lock()

    async def authorize(
        self,
        entry: Entry,
        headers: Mapping[str, str],
        in_url: str | None,
        scopes: Sequence[str],
        *,
        limited: bool = False,
    ) -> Access:
        """Check the key of a request, and note it and the bucket.

        Args:
            in_url: The bucket that its URL names.
            scopes: Any one of these is needed; without scopes no key is.
            limited: Whether the caller checks what the key covers. Otherwise it must cover everything.

        Raises:
            Problem: 401 for a missing, unknown or expired key; 403 for one that does not allow this.
        """
        entry.bucket = bucket = _bucket(headers, in_url)
        if not scopes:
            return Access(None, bucket)
        if self._clock() - self._read_at > _FRESH_S:
            async with self._reading:
                if self._clock() - self._read_at > _FRESH_S:  # nobody else has done it meanwhile
                    await self._read()
        if self.is_open:
            self._check_local(headers)
            return Access(None, bucket)
        token = _token(headers)
        if not token:
            hint = "" if self._known else " The store has no keys left: `kindler keys add` creates one."
            raise Problem(
                401,
                f"missing API key; send 'Authorization: Bearer <key>'.{hint}",
                {"www-authenticate": "Bearer"},
            )
        key = await self._find(id_of(token))
        if key is None or not key.is_of(token) or key.is_over():
            raise Problem(401, "unknown or expired API key.", {"www-authenticate": "Bearer"})
        access = Access(key, bucket)
        access.require(*scopes)
        if key.is_limited and not limited:
            raise Problem(
                403, f"the API key {key.id} is restricted; this endpoint needs an unrestricted key."
            )
        entry.key = key.id
        return access

    def _check_local(self, headers: Mapping[str, str]) -> None:
        """Reject what a page of another site sends, under its own name or under one that it made ours."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not _is_of_this_machine(host):
            raise Problem(
                403, f"a server without API keys only answers on a loopback host name, not {host[:100]!r}."
            )
        if origin is not None and origin not in self._origins:
            try:
                site = urlsplit(origin).netloc
            except ValueError:
                site = ""
            if not site or not _is_of_this_machine(site):
                raise Problem(
                    403, f"a server without API keys does not answer requests from {origin[:100]!r}."
                )

    async def _find(self, key_id: str) -> Key | None:
        """A key by its id; one that is not known may be new. These are looked for one after the other."""
        if key_id not in self._known and key_id not in self._unknown and 0 < len(key_id) <= _LONGEST_ID:
            async with self._finding:
                if key_id not in self._known and key_id not in self._unknown:
                    loop = asyncio.get_running_loop()
                    key = await loop.run_in_executor(self._executor, self._keys.find, key_id)
                    if key is not None:
                        self._known[key_id] = key
                    elif len(self._unknown) < _MOST_UNKNOWN:
                        self._unknown.add(key_id)
        return self._known.get(key_id)

    async def _read(self) -> None:
        try:
            loop = asyncio.get_running_loop()
            keys, were_made = await loop.run_in_executor(
                self._executor, lambda: (self._keys.list(), self._keys.were_made())
            )
            self._known = {key.id: key for key in keys}
            self._unknown.clear()
            self.is_open &= not were_made
        except StoreError as exc:
            if self._read_at < 0:
                raise
            # Loaded models can still answer clients whose keys were valid a moment ago.
            _log.warning("cannot read the API keys: %s", exc)
        self._read_at = self._clock()


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
