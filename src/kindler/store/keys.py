"""API keys, in a table of the catalog. A key itself is shown once; what is kept is its SHA-256.

A key is 256 random bits, so a plain hash is enough: there is nothing to guess, which slow hashes are against.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import chain
from types import SimpleNamespace
from typing import Any

import sqlalchemy as sa

from kindler.errors import ConfigError, NotFoundError
from kindler.store.catalog import Catalog
from kindler.store.names import check_bucket, check_glob
from kindler.store.store import VersionStore
from kindler.store.tables import keys as _keys
from kindler.store.tables import state as _state

SCOPES = ("read", "predict", "write", "admin")
SHELVES = ("models", "datasets", "scripts")
_PREFIX = "kdl"


@dataclass(frozen=True, slots=True)
class Key:
    """The record of a key; its id is not a secret."""

    id: str
    scopes: tuple[str, ...]
    note: str
    created: datetime
    expires: datetime | None  # None for never
    sha256: str
    buckets: tuple[str, ...] = ()  # the only ones that it is for; empty for all
    # Globs of the only names that it is for, by shelf; if there are any, shelves without are closed to it.
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_limited(self) -> bool:
        """Whether it is limited to some buckets or names."""
        return bool(self.buckets or self.names)

    def allows(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    def is_over(self) -> bool:
        return self.expires is not None and self.expires <= datetime.now(timezone.utc)

    def is_of(self, token: str) -> bool:
        """Whether it is the key that a client sent; takes constant time."""
        return hmac.compare_digest(self.sha256, _hashed(token))


class Keys:
    """The keys of a store.

    Args:
        store: The store, whose connections are used, or its URL.
    """

    def __init__(self, store: VersionStore | str) -> None:
        self._is_owner = isinstance(store, str)
        self._database = (Catalog(store) if isinstance(store, str) else store.catalog).database

    def add(
        self,
        scopes: Sequence[str],
        *,
        note: str = "",
        days: float | None = None,
        buckets: Sequence[str] = (),
        names: Mapping[str, Sequence[str]] | None = None,
    ) -> tuple[Key, str]:
        """Create a key.

        Args:
            scopes: What it allows.
            note: What it is for.
            days: Days until it expires; None means never.
            buckets: The buckets that it is limited to; empty means all.
            names: Globs of the names that it is limited to, by shelf: `{"models": ["team/**"]}`. Shelves that
                are not listed are closed to the key.

        Returns:
            Its record, and the key itself, which cannot be shown again.
        """
        if not scopes or set(scopes) - set(SCOPES):
            raise ConfigError(f"scopes={list(scopes)}: must be one or more of {', '.join(SCOPES)}.")
        if days is not None and not 0 < days < 100_000:
            raise ConfigError(f"days={days}: must be greater than 0.")
        globs = {shelf: tuple(patterns) for shelf, patterns in (names or {}).items() if patterns}
        if unknown := sorted(set(globs) - set(SHELVES)):
            raise ConfigError(f"names={unknown}: the keys must be shelves: {', '.join(SHELVES)}.")
        for pattern in chain.from_iterable(globs.values()):
            if not isinstance(pattern, str) or not pattern or "@" in pattern or "^" in pattern:
                raise ConfigError(
                    f"{pattern!r} is not a glob for names.\nHint: a key covers all versions of a name."
                )
            check_glob(pattern)
        now = datetime.now(timezone.utc)
        name = secrets.token_hex(4)
        token = f"{_PREFIX}_{name}_{secrets.token_urlsafe(32)}"
        allowed = [scope for scope in SCOPES if scope in scopes]
        limits = {"scopes": allowed, "buckets": [check_bucket(bucket) for bucket in buckets], "names": globs}
        row = {
            "id": name,
            "sha256": _hashed(token),
            # Limits are JSON, which earlier versions take for unknown scopes: to them, it allows nothing.
            "scopes": json.dumps(limits) if buckets or globs else " ".join(allowed),
            "note": note,
            "created": now.isoformat(),
            "expires": None if days is None else (now + timedelta(days=days)).isoformat(),
        }
        with self._database.writing() as connection:
            connection.execute(_state.update().values(protected=1))
            connection.execute(_keys.insert().values(**row))
        return _read(SimpleNamespace(**row)), token

    def find(self, name: str) -> Key | None:
        """The key with an id; None if there is none."""
        rows = self._database.rows(sa.select(_keys).where(_keys.c.id == name))
        return _read(rows[0]) if rows else None

    def list(self) -> list[Key]:
        """All keys, oldest first."""
        return [_read(row) for row in self._database.rows(sa.select(_keys).order_by(_keys.c.created))]

    def were_made(self) -> bool:
        """Whether the store has keys, or ever had some: once it had, it is never open to everyone again."""
        # Older versions of Kindler add keys without saying so.
        query = sa.select(sa.or_(_state.c.protected == 1, sa.exists(sa.select(_keys.c.id))))
        return bool(self._database.values(query)[0])

    def remove(self, name: str) -> None:
        """Revoke a key; takes effect within seconds.

        Raises:
            NotFoundError: There is no key with that id.
        """
        if self.find(name) is None:
            raise NotFoundError(what="key", name=name, available=[key.id for key in self.list()])
        with self._database.writing() as connection:
            connection.execute(_keys.delete().where(_keys.c.id == name))

    def close(self) -> None:
        """Close the connections, unless they are the store's."""
        if self._is_owner:
            self._database.close()


def id_of(token: str) -> str:
    """The part of a key that names it."""
    parts = token.split("_", 2)
    return parts[1] if len(parts) == 3 and parts[0] == _PREFIX else ""


def _read(row: Any) -> Key:
    limits: Mapping[str, Any] = json.loads(row.scopes) if row.scopes.startswith("{") else {}
    return Key(
        row.id,
        tuple(limits["scopes"] if limits else row.scopes.split()),
        row.note,
        datetime.fromisoformat(row.created),
        datetime.fromisoformat(row.expires) if row.expires else None,
        row.sha256,
        tuple(limits.get("buckets", ())),
        {shelf: tuple(globs) for shelf, globs in limits.get("names", {}).items()},
    )


def _hashed(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()
