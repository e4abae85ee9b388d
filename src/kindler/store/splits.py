"""Splits: which part of a tag's requests goes to other versions, in a table of the catalog.

A canary answers its share of the requests. A shadow gets copies of its share of them, and its responses are
discarded. Servers act on splits; the store only keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import sqlalchemy as sa

from kindler.errors import ConfigError
from kindler.store.store import VersionStore
from kindler.store.tables import splits as _splits
from kindler.store.versions import Address


@dataclass(frozen=True, slots=True)
class Split:
    """How the requests of a tag of a model are divided: versions, and the share of each.

    What the canaries leave goes to the version that the tag points to.

    >>> Split("default", "net", "prod", canary={4: 0.7, 5: 0.6})
    Traceback (most recent call last):
    kindler.errors.ConfigError: canary={4: 0.7, 5: 0.6}: the shares together must be at most 1.
    """

    bucket: str
    name: str
    tag: str
    canary: Mapping[int, float] = field(default_factory=dict)
    shadow: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, shares in (("canary", self.canary), ("shadow", self.shadow)):
            for number, share in shares.items():
                if type(number) is not int or number < 1:
                    raise ConfigError(f"{what}={dict(shares)}: {number!r} is not a version number.")
                if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
                    raise ConfigError(
                        f"{what}={dict(shares)}: {share!r} is not a valid share; it must be above 0 and at"
                        f" most 1."
                    )
        if sum(self.canary.values()) > 1 + 1e-9:
            raise ConfigError(f"canary={dict(self.canary)}: the shares together must be at most 1.")


class Splits:
    """The splits of a store."""

    def __init__(self, store: VersionStore) -> None:
        self._database = store.catalog.database

    def put(self, split: Split) -> None:
        """Divide a tag's requests; servers notice within `--refresh-s`. Without shares, the split ends."""
        row = {"bucket": split.bucket, "name": split.name, "tag": split.tag}
        own = [_splits.c[column] == value for column, value in row.items()]
        shares = {"canary": split.canary, "shadow": split.shadow}
        rules = {what: [(n, float(share)) for n, share in by.items()] for what, by in shares.items()}
        with self._database.writing() as connection:
            connection.execute(_splits.delete().where(*own))
            if split.canary or split.shadow:
                connection.execute(_splits.insert().values(**row, rules=json.dumps(rules)))

    def list(self, address: Address | None = None) -> list[Split]:
        """All splits, or those of one model."""
        query = sa.select(_splits).order_by(_splits.c.bucket, _splits.c.name, _splits.c.tag)
        if address is not None:
            query = query.where(_splits.c.bucket == address.bucket, _splits.c.name == address.name)
        return [
            Split(row.bucket, row.name, row.tag, **{k: dict(v) for k, v in json.loads(row.rules).items()})
            for row in self._database.rows(query)
        ]
