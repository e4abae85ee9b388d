"""API keys, in a table of the store's database. A key itself is shown once; what is kept is its SHA-256.

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
from typing import Any

import sqlalchemy as sa

from kindler.errors import ConfigError, NotFoundError
from kindler.store.database import Database
from kindler.store.names import LONGEST, check_bucket, matches
from kindler.store.urls import parse

SCOPES = ("read", "predict", "write", "admin")
SHELVES = ("models", "datasets", "scripts")
_MOST_STARS = 16
_PREFIX = "kdl"
_LOCK_KEY = 0x6B657973  # "keys": for PostgreSQL, while the table is made

_tables = sa.MetaData()
_keys = sa.Table(
    "kindler_keys",
    _tables,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("sha256", sa.Text, nullable=False),
    sa.Column("scopes", sa.Text, nullable=False),
    sa.Column("note", sa.Text, nullable=False),
    sa.Column("created", sa.Text, nullable=False),
    sa.Column("expires", sa.Text),
)


@dataclass(frozen=True, slots=True)
class Key:
    """What is known of a key.

    Attributes:
        id: Its name; no secret.
        scopes: What it allows: "read", "predict", "write", "admin". The last allows everything.
        note: What it is for.
        created: When it was made.
        expires: When it ends; None for never.
        sha256: The hash of its secret part.
        buckets: The only buckets that it is for; empty for all.
        names: For each shelf, globs of the only names that it is for. If it is empty, all names of all
            shelves; else none of the shelves that it lacks.
    """

    id: str
    scopes: tuple[str, ...]
    note: str
    created: datetime
    expires: datetime | None
    sha256: str
    buckets: tuple[str, ...] = ()
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_limited(self) -> bool:
        """Whether it is for some buckets or names only."""
        return bool(self.buckets or self.names)

    def allows(self, scope: str) -> bool:
        """Whether it is good for something."""
        return scope in self.scopes or "admin" in self.scopes

    def is_over(self, now: datetime | None = None) -> bool:
        """Whether its time is over."""
        return self.expires is not None and self.expires <= (now or datetime.now(timezone.utc))

    def is_of(self, token: str) -> bool:
        """Whether it is the key that a client sent; takes the same time whatever that is."""
        return hmac.compare_digest(self.sha256, _hashed(token))


class Keys:
    """The keys of a store.

    Args:
        url: The store's URL.
    """

    def __init__(self, url: str) -> None:
        self._database = Database(parse(url).catalog)
        self._made = False

    def add(
        self,
        scopes: Sequence[str],
        *,
        note: str = "",
        days: float | None = None,
        buckets: Sequence[str] = (),
        names: Mapping[str, Sequence[str]] | None = None,
    ) -> tuple[Key, str]:
        """Make a key.

        Args:
            scopes: What it allows.
            note: What it is for.
            days: How long; None is for ever.
            buckets: The only buckets that it is for; empty for all.
            names: Globs of the only names that it is for, by shelf: `{"models": ["team/**"]}`. A shelf
                that is not there is closed to the key.

        Returns:
            What is known of it, and the key itself, which nobody can find out again.
        """
        unknown = sorted(set(scopes) - set(SCOPES))
        if unknown or not scopes:
            raise ConfigError(f"scopes={list(scopes)}: must be one or more of {', '.join(SCOPES)}.")
        if days is not None and not 0 < days < 100_000:
            raise ConfigError(f"days={days}: must be greater than 0.")
        globs = {shelf: tuple(patterns) for shelf, patterns in (names or {}).items() if patterns}
        _check_limits(buckets, globs)
        now = datetime.now(timezone.utc)
        name = secrets.token_hex(4)
        token = f"{_PREFIX}_{name}_{secrets.token_urlsafe(32)}"
        key = Key(
            name,
            tuple(scope for scope in SCOPES if scope in scopes),
            note,
            now,
            None if days is None else now + timedelta(days=days),
            _hashed(token),
            tuple(buckets),
            globs,
        )
        row = {
            "id": key.id,
            "sha256": key.sha256,
            "scopes": _written(key),
            "note": key.note,
            "created": key.created.isoformat(),
            "expires": key.expires and key.expires.isoformat(),
        }
        with self._database.writing() as connection:
            self._database.make(connection, _tables, _LOCK_KEY)
            connection.execute(_keys.insert().values(**row))
        return key, token

    def list(self) -> list[Key]:
        """All keys, oldest first."""
        if not self._is_made():
            return []
        with self._database.reading() as connection:
            rows = connection.execute(sa.select(_keys).order_by(_keys.c.created)).all()
        return [_read(row) for row in rows]

    def were_made(self) -> bool:
        """Whether the store has keys, or had some once: it is not open to everybody again."""
        return self._is_made()

    def remove(self, name: str) -> None:
        """Take a key away; servers notice within seconds.

        Raises:
            NotFoundError: There is none of that id.
        """
        gone = 0
        if self._is_made():
            with self._database.writing() as connection:
                gone = connection.execute(_keys.delete().where(_keys.c.id == name)).rowcount
        if not gone:
            raise NotFoundError(what="key", name=name, available=[key.id for key in self.list()])

    def close(self) -> None:
        """Close the connections."""
        self._database.close()

    def _is_made(self) -> bool:
        """Whether there is a table: a store that may only be read, or never had a key, has none."""
        if not self._made:
            with self._database.reading() as connection:
                self._made = sa.inspect(connection).has_table(_keys.name)
        return self._made


def id_of(token: str) -> str:
    """The part of a key that names it."""
    parts = token.split("_", 2)
    return parts[1] if len(parts) == 3 and parts[0] == _PREFIX else ""


def _written(key: Key) -> str:
    """The scopes, with the limits of a key that has any.

    As JSON, which earlier versions of Kindler take for unknown scopes: to them, such a key allows nothing.
    """
    if not key.is_limited:
        return " ".join(key.scopes)
    return json.dumps({"scopes": key.scopes, "buckets": key.buckets, "names": key.names})


def _read(row: sa.Row[tuple[str, ...]]) -> Key:
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


def _check_limits(buckets: Sequence[str], names: Mapping[str, Sequence[str]]) -> None:
    for bucket in buckets:
        check_bucket(bucket)
    unknown = sorted(set(names) - set(SHELVES))
    if unknown:
        raise ConfigError(f"names={unknown}: must be of the shelves {', '.join(SHELVES)}.")
    for pattern in (pattern for globs in names.values() for pattern in globs):
        if not isinstance(pattern, str) or not pattern or "@" in pattern or "^" in pattern:
            raise ConfigError(
                f"{pattern!r} is not a glob of names.\nHint: a key covers all versions of a name."
            )
        if len(pattern) > LONGEST or pattern.count("*") > _MOST_STARS:
            raise ConfigError(
                f"{pattern[:80]!r}: a glob has at most {LONGEST} characters and {_MOST_STARS} stars."
            )
        matches(pattern, "")  # raises if it cannot be compiled


def _hashed(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()
