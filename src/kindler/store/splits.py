"""Splits: which part of an alias's requests goes to other versions, in a table of the store's database.

A canary answers its share of the requests. A shadow is called with its share of them beside, and nobody sees
what it answers. Servers act on splits; the store only keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from kindler.errors import ConfigError
from kindler.store.database import Database
from kindler.store.urls import parse
from kindler.store.versions import Address

_LOCK_KEY = 0x73706C74  # "splt": for PostgreSQL, while the table is made

_tables = sa.MetaData()
_splits = sa.Table(
    "kindler_splits",
    _tables,
    sa.Column("bucket", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("alias", sa.Text, primary_key=True),
    sa.Column("rules", sa.Text, nullable=False),
)


@dataclass(frozen=True, slots=True)
class Split:
    """How the requests of an alias of a model are divided.

    Attributes:
        bucket: The model's bucket.
        name: The model.
        alias: The alias; what the canaries leave goes to the version that it points to.
        canary: Numbers of versions, and the share of requests that each answers.
        shadow: Numbers of versions, and the share of requests that each is called with beside.

    >>> Split("default", "net", "prod", canary={4: 0.7, 5: 0.6})
    Traceback (most recent call last):
    kindler.errors.ConfigError: canary={4: 0.7, 5: 0.6}: the shares together must be at most 1.
    """

    bucket: str
    name: str
    alias: str
    canary: Mapping[int, float] = field(default_factory=dict)
    shadow: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, shares in (("canary", self.canary), ("shadow", self.shadow)):
            for number, share in shares.items():
                if type(number) is not int or number < 1:
                    raise ConfigError(f"{what}={dict(shares)}: {number!r} is not the number of a version.")
                if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
                    raise ConfigError(
                        f"{what}={dict(shares)}: {share!r} is not a share; it must be above 0, at most 1."
                    )
        if sum(self.canary.values()) > 1 + 1e-9:
            raise ConfigError(f"canary={dict(self.canary)}: the shares together must be at most 1.")


class Splits:
    """The splits of a store.

    Args:
        url: The store's URL.
    """

    def __init__(self, url: str) -> None:
        self._database = Database(parse(url).catalog)
        self._made = False

    def put(self, split: Split) -> None:
        """Let an alias's requests be divided so from now on; servers notice within `--refresh-s`."""
        rules = {"canary": _pairs(split.canary), "shadow": _pairs(split.shadow)}
        with self._database.writing() as connection:
            self._database.make(connection, _tables, _LOCK_KEY)
            connection.execute(_splits.delete().where(*_is(split.bucket, split.name, split.alias)))
            if split.canary or split.shadow:
                row = {"bucket": split.bucket, "name": split.name, "alias": split.alias}
                connection.execute(_splits.insert().values(**row, rules=json.dumps(rules)))

    def list(self, address: Address | None = None) -> list[Split]:
        """All splits, or those of one model."""
        if not self._is_made():
            return []
        wanted = sa.select(_splits).order_by(_splits.c.bucket, _splits.c.name, _splits.c.alias)
        if address is not None:
            wanted = wanted.where(_splits.c.bucket == address.bucket, _splits.c.name == address.name)
        with self._database.reading() as connection:
            return [_read(row) for row in connection.execute(wanted)]

    def close(self) -> None:
        """Close the connections."""
        self._database.close()

    def _is_made(self) -> bool:
        """Whether there is a table: a store that may only be read, or never had a split, has none."""
        if not self._made:
            with self._database.reading() as connection:
                self._made = sa.inspect(connection).has_table(_splits.name)
        return self._made


def _is(bucket: str, name: str, alias: str) -> tuple[sa.ColumnElement[bool], ...]:
    return _splits.c.bucket == bucket, _splits.c.name == name, _splits.c.alias == alias


def _pairs(shares: Mapping[int, float]) -> list[tuple[int, float]]:
    return [(number, float(share)) for number, share in shares.items()]


def _read(row: Any) -> Split:
    rules = json.loads(row.rules)
    canary, shadow = ({int(number): share for number, share in rules[what]} for what in ("canary", "shadow"))
    return Split(row.bucket, row.name, row.alias, canary, shadow)
