"""The rows behind a store: names, versions, files, tags, keys and splits, in SQLite or PostgreSQL.

A version appears in one transaction, together with its number, its files and its tags, or not at all. Blobs
are removed only while nobody publishes (`unneeded`), and a publisher looks in the same transaction whether
they are all there; so no version is ever without its bytes, however the two meet.

A version that only adds to the one before it shares the rows of its files: it has those from its `base` to
its own number. A dataset with a thousand appends takes a thousand rows, not half a million.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from kindler.errors import ConfigError
from kindler.store import urls
from kindler.store._migration import upgrade
from kindler.store.database import Database
from kindler.store.selectors import Selector
from kindler.store.tables import FORMAT, insert_files, metadata, packed, part_order
from kindler.store.tables import files as _files
from kindler.store.tables import keys as _keys
from kindler.store.tables import objects as _objects
from kindler.store.tables import state as _state
from kindler.store.tables import tags as _tags
from kindler.store.tables import versions as _versions
from kindler.store.versions import Address, File, Version

_CHUNK = 500
_LOCK_KEY = 0x6B696E64  # "kind": for PostgreSQL, while tables are made

_joined = _versions.join(_objects, _versions.c.object == _objects.c.id)
_needs_file = (
    (_versions.c.object == _files.c.object)
    & (_versions.c.base <= _files.c.first)
    & (_versions.c.number >= _files.c.first)
)
_BEYOND = 2**31 - 1  # no version has this number
_ANY = SimpleNamespace(**{name: sa.bindparam(name) for name in ("bucket", "shelf", "name")})  # an address


class LackingBlobs(Exception):
    """A version cannot be published: blobs of it are not there."""


class OvertakenError(Exception):
    """The newest version is another one than the publisher took it to be."""


class Catalog:
    """What is in a store.

    Args:
        url: The store's URL.

    Attributes:
        database: Where the rows are.
        blobs: The URL of the blobs.

    Raises:
        ConfigError: The store is new and its URL does not say where to put the blobs, or a newer version of
            Kindler has opened it.
    """

    def __init__(self, url: str) -> None:
        place = urls.parse(url)
        self.database = Database(place.catalog)
        is_sqlite = self.database.dialect == "sqlite"
        self._insert: Callable[[sa.Table], Any] = sqlite.insert if is_sqlite else postgresql.insert
        # By the codes of the characters, as Python sorts; databases do not agree on an order of text.
        self._name: Any = _objects.c.name if is_sqlite else _objects.c.name.collate("C")
        entry = (_files.c.path, _files.c.sha256, _files.c.size, _files.c.rows)
        listed: Any = (
            sa.func.json_group_array(sa.func.json_array(*entry))
            if is_sqlite
            else sa.func.json_agg(sa.func.json_build_array(*entry))
        )
        files = sa.select(sa.cast(listed, sa.Text)).where(_needs_file).correlate(_versions)
        self._columns = [*_versions.c, files.scalar_subquery().label("files")]
        # The one statement that is asked all the time, made once: a version and those before it, newest
        # first. By a subquery and not by a join: so the index has the order, and it takes as long for the
        # thousandth version.
        find = (
            sa.select(*self._columns)
            .where(_versions.c.object == _id(_ANY), _versions.c.number <= sa.bindparam("number"))
            .order_by(_versions.c.number.desc())
            .limit(sa.bindparam("count"))
        )
        self._find = self.database.compiled(find)
        self.blobs = self._open(place)

    def publish(
        self,
        draft: Version,
        *,
        has: Callable[[str], bool],
        tags: Sequence[str] = (),
        after: int | None = None,
        grows: Version | None = None,
    ) -> Version:
        """Make the draft the newest version of its name; see `Store.publish`.

        Raises:
            LackingBlobs: `has` says that some of its blobs are not there.
            OvertakenError: The newest version is not `after`.
        """
        entries, manifest = packed(draft.files, draft.meta, draft.attributes)
        with self.database.writing() as connection:
            connection.execute(sa.select(_state.c.id).with_for_update(read=True)).all()
            object_id, number = self._next(connection, draft.address)
            latest = connection.execute(
                sa.select(_versions.c.number, _versions.c.base)
                .where(_versions.c.object == object_id)
                .order_by(_versions.c.number.desc())
                .limit(1)
            ).first()
            newest = latest.number if latest else 0
            if after is not None and after != newest:
                raise OvertakenError(f"the newest version is {newest}")
            base = number
            if grows is not None and latest is not None and grows.number == newest:
                had = set(packed(grows.files, grows.meta, {})[0])
                if had <= set(entries):
                    base, entries = latest.base, [entry for entry in entries if entry not in had]
            hashes = sorted({sha256 for _, sha256, _, _ in entries})
            known = self._needed(connection, hashes)
            lacking = [sha256 for sha256 in hashes if sha256 not in known and not has(sha256)]
            if lacking:
                raise LackingBlobs(f"{len(lacking)} of its blobs were removed meanwhile")
            version = replace(draft, number=number, created=datetime.now(timezone.utc))
            connection.execute(
                _versions.insert().values(
                    object=object_id,
                    number=number,
                    kind=version.kind,
                    created=version.created.isoformat(),
                    size=version.size,
                    digest=version.digest,
                    manifest=manifest,
                    base=base,
                )
            )
            insert_files(connection, object_id, number, entries)
            for tag in tags:
                self._move(connection, object_id, tag, number)
        return version

    def find(self, address: Address, selector: Selector) -> Version | None:
        """The selected version, if it exists."""
        with self.database.reading() as connection:
            ref = selector.ref
            number = self._tags(connection, address).get(ref) if isinstance(ref, str) else ref
            if number is None and ref is not None:
                return None
            values = {**asdict(address), "count": selector.back + 1}
            values["number"] = _BEYOND if number is None else min(number, _BEYOND)
            rows = self._find(connection, values).all()
        if len(rows) <= selector.back or number not in (None, rows[0].number):
            return None
        return _version(address, rows[-1], _entries(rows[-1].files))

    def versions(self, address: Address) -> list[Version]:
        """All versions of a name, oldest first; none for a name that does not exist."""
        own = _id(address)
        with self.database.reading() as connection:
            # Files last: so those of each version are among them.
            rows = connection.execute(
                sa.select(_versions).where(_versions.c.object == own).order_by(_versions.c.number)
            ).all()
            query = sa.select(*list(_files.c)[1:]).where(_files.c.object == own)
            added = [(row.first, (File(*row[1:4]), row.rows)) for row in connection.execute(query)]
        added.sort(key=lambda row: row[1][0].path)
        return [
            _version(address, row, [entry for first, entry in added if row.base <= first <= row.number])
            for row in rows
        ]

    def history(self, address: Address) -> list[tuple[int, datetime]]:
        """The numbers of all versions of a name, oldest first, and when they were published."""
        query = sa.select(_versions.c.number, _versions.c.created).where(_versions.c.object == _id(address))
        with self.database.reading() as connection:
            rows = connection.execute(query.order_by(_versions.c.number)).all()
        return [(row.number, datetime.fromisoformat(row.created)) for row in rows]

    def hashes(self, after: str, limit: int) -> list[str]:
        """Hashes of needed blobs, in order, after this one."""
        query = sa.select(_files.c.sha256).where(_files.c.sha256 > after).distinct()
        with self.database.reading() as connection:
            return list(connection.scalars(query.order_by(_files.c.sha256).limit(limit)))

    def users(self, sha256: str, limit: int) -> list[str]:
        """Versions that need a blob, such as "default/models/net@3"; at most `limit`."""
        joined = _files.join(_versions, _needs_file).join(_objects, _files.c.object == _objects.c.id)
        query = sa.select(_objects.c.bucket, _objects.c.shelf, _objects.c.name, _versions.c.number)
        query = query.select_from(joined).where(_files.c.sha256 == sha256).distinct().limit(limit)
        with self.database.reading() as connection:
            rows = connection.execute(query).all()
        return sorted(f"{row.bucket}/{row.shelf}/{row.name}@{row.number}" for row in rows)

    def numbers(self, address: Address, limit: int) -> list[int]:
        """The numbers of the newest versions of a name, oldest first."""
        # By a subquery, as in `_find`: with a join, SQLite reads all versions to find that there is none.
        query = sa.select(_versions.c.number).where(_versions.c.object == _id(address))
        with self.database.reading() as connection:
            numbers = list(connection.scalars(query.order_by(_versions.c.number.desc()).limit(limit)))
        return numbers[::-1]

    def newest(
        self, bucket: str, shelf: str, prefix: str = "", *, after: str = "", limit: int | None = None
    ) -> list[Version]:
        """The newest version of each name with the prefix that comes after `after`, by name."""
        newest = _versions.alias()
        query = self._names(sa.select(_objects.c.name, *self._columns), bucket, shelf, prefix, after, limit)
        query = query.select_from(_joined).where(
            _versions.c.number
            == sa.select(sa.func.max(newest.c.number))
            .where(newest.c.object == _objects.c.id)
            .scalar_subquery()
        )
        with self.database.reading() as connection:
            rows = connection.execute(query).all()
        return [_version(Address(bucket, shelf, row.name), row, _entries(row.files)) for row in rows]

    def names(
        self, bucket: str, shelf: str, prefix: str = "", *, after: str = "", limit: int | None = None
    ) -> list[str]:
        """The names alone."""
        query = self._names(sa.select(_objects.c.name), bucket, shelf, prefix, after, limit).where(
            sa.exists().where(_versions.c.object == _objects.c.id)
        )
        with self.database.reading() as connection:
            return list(connection.scalars(query))

    def all_tags(
        self, bucket: str, shelf: str, first: str | None = None, last: str | None = None
    ) -> dict[str, dict[str, int]]:
        """The tags of all names of a shelf that have any, and the numbers they point to.

        With `first` and `last`, only of names from the one to the other: those of a page.
        """
        joined = _tags.join(_objects, _tags.c.object == _objects.c.id)
        query = sa.select(_objects.c.name, _tags.c.tag, _tags.c.number).select_from(joined)
        query = query.where(_objects.c.bucket == bucket, _objects.c.shelf == shelf)
        if first is not None and last is not None:
            query = query.where(self._name >= first, self._name <= last)
        by_name: dict[str, dict[str, int]] = {}
        with self.database.reading() as connection:
            for row in connection.execute(query):
                by_name.setdefault(row.name, {})[row.tag] = row.number
        return by_name

    def buckets(self) -> list[str]:
        """The buckets that are not empty."""
        with self.database.reading() as connection:
            return sorted(connection.scalars(sa.select(_objects.c.bucket).select_from(_joined).distinct()))

    def drop(self, address: Address, number: int | None = None, *, forget: bool = False) -> list[int]:
        """Delete a version, or all of a name; returns which. A name that is forgotten begins with 1 again."""
        with self.database.writing() as connection:
            # Nobody publishes this name meanwhile: the next version might grow on the one that goes.
            object_id = connection.scalar(_select_id(address).with_for_update())
            unneeded = _files.c.object == object_id
            which = _versions.c.object == object_id
            if number is not None:
                # The version before has all older files of the same base.
                before = sa.select(sa.func.coalesce(sa.func.max(_versions.c.number), 0)).where(
                    which, _versions.c.number < number
                )
                which &= _versions.c.number == number
                unneeded &= _files.c.first.between(before.scalar_subquery() + 1, number)
                unneeded &= ~sa.exists().where(_needs_file).correlate(_files)
            gone = sorted(connection.scalars(_versions.delete().where(which).returning(_versions.c.number)))
            if gone:
                connection.execute(_files.delete().where(unneeded))
            if forget:
                connection.execute(_objects.delete().where(_objects.c.id == object_id))
            return gone

    def tags(self, address: Address) -> dict[str, int]:
        """The tags of a name, and the numbers they point to."""
        with self.database.reading() as connection:
            return self._tags(connection, address)

    def move_tag(self, version: Version, tag: str) -> bool:
        """Point the tag at the version; False if the version does not exist."""
        with self.database.writing() as connection:
            query = sa.select(_versions.c.object).where(_versions.c.object == _id(version.address))
            object_id = connection.scalar(query.where(_versions.c.number == version.number))
            if object_id is not None:
                self._move(connection, object_id, tag, version.number)
        return object_id is not None

    def remove_tag(self, address: Address, tag: str) -> bool:
        """Remove a tag; False if it does not exist."""
        with self.database.writing() as connection:
            which = (_tags.c.object == _id(address)) & (_tags.c.tag == tag)
            return bool(connection.execute(_tags.delete().where(which)).rowcount)

    @contextmanager
    def unneeded(self, hashes: Sequence[str]) -> Iterator[list[str]]:
        """Which of the blobs no version needs; while the block runs, nobody publishes."""
        with self.database.writing() as connection:
            connection.execute(sa.select(_state.c.id).with_for_update()).all()
            needed = self._needed(connection, hashes)
            yield [sha256 for sha256 in hashes if sha256 not in needed]

    def is_protected(self) -> bool:
        """Whether there is a key, or was one once."""
        # Older versions of Kindler add keys without saying so.
        query = sa.select(sa.or_(_state.c.protected == 1, sa.exists(sa.select(_keys.c.id))))
        with self.database.reading() as connection:
            return bool(connection.scalar(query))

    def protect(self, connection: sa.Connection) -> None:
        """Remember that there was a key."""
        connection.execute(_state.update().values(protected=1))

    def _open(self, place: urls.Place) -> str:
        columns = sa.select(_state.c.id, _state.c.format, _state.c.blobs)  # which every format has
        with self.database.reading() as connection:
            # Before it is asked for: PostgreSQL ends a transaction in which a table was missing.
            exists = sa.inspect(connection).has_table(_state.name)
            row = connection.execute(columns).first() if exists else None
        if row is None or row.format < FORMAT:
            if row is None and not (place.blobs or place.new_blobs):
                raise ConfigError(
                    "this store is new, and its URL does not say where to put the blobs.\n"
                    "Hint: add ?blobs=s3://bucket/prefix or ?blobs=file:///folder."
                )
            if row is not None and self.database.is_read_only:
                self.database = self.database.copied()
            with self.database.writing() as connection:
                if self.database.dialect == "postgresql":  # one process at a time
                    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK_KEY)))
                if row is None:
                    protected = sa.inspect(connection).has_table(_keys.name)  # made before the store was
                    metadata.create_all(connection)
                    blobs = urls.without_secrets(place.blobs or str(place.new_blobs))
                    first = {"id": 1, "format": FORMAT, "blobs": blobs, "protected": int(protected)}
                    connection.execute(self._insert(_state).values(first).on_conflict_do_nothing())
                else:
                    upgrade(connection)
                row = connection.execute(columns).one()
        if row.format != FORMAT:
            raise ConfigError(
                f"the store's catalog has the format {row.format}; this version of Kindler reads up to"
                f" {FORMAT}.\n"
                "Hint: update Kindler; a newer version has opened this store."
            )
        known, wanted = (str(url).partition("?")[0] for url in (row.blobs, place.blobs or row.blobs))
        if wanted != known:
            raise ConfigError(
                f"the store's blobs are at {known}, not at {wanted}.\n"
                "Hint: leave blobs=... out of the URL; the catalog records it."
            )
        return place.blobs or str(row.blobs)

    def _names(self, query: Any, bucket: str, shelf: str, prefix: str, after: str, limit: int | None) -> Any:
        name = self._name
        query = query.where(_objects.c.bucket == bucket, _objects.c.shelf == shelf).order_by(name)
        if prefix:
            # The range is what the index is used for: without its end, all names behind it would be read.
            query = query.where(_objects.c.name.startswith(prefix, autoescape=True), name < _behind(prefix))
        if after or prefix:  # one bound: of two, SQLite would use the first for the index
            query = query.where(name >= prefix if prefix > after else name > after)
        return query if limit is None else query.limit(limit)

    def _next(self, connection: sa.Connection, address: Address) -> tuple[int, int]:
        statement = self._insert(_objects).values(
            bucket=address.bucket, shelf=address.shelf, name=address.name, last=1
        )
        statement = statement.on_conflict_do_update(
            index_elements=["bucket", "shelf", "name"], set_={"last": _objects.c.last + 1}
        ).returning(_objects.c.id, _objects.c.last)
        row = connection.execute(statement).one()
        return row.id, row.last

    def _move(self, connection: sa.Connection, object_id: int, tag: str, number: int) -> None:
        row = self._insert(_tags).values(object=object_id, tag=tag, number=number)
        connection.execute(
            row.on_conflict_do_update(index_elements=["object", "tag"], set_={"number": number})
        )

    def _tags(self, connection: sa.Connection, address: Address) -> dict[str, int]:
        query = sa.select(_tags.c.tag, _tags.c.number).where(_tags.c.object == _id(address))
        return {row.tag: row.number for row in connection.execute(query)}

    def _needed(self, connection: sa.Connection, hashes: Sequence[str]) -> set[str]:
        needed: set[str] = set()
        for start in range(0, len(hashes), _CHUNK):
            some = hashes[start : start + _CHUNK]
            needed.update(
                connection.scalars(sa.select(_files.c.sha256).where(_files.c.sha256.in_(some)).distinct())
            )
        return needed


def _entries(files: str | None) -> list[tuple[File, int | None]]:
    """The files of a version by path, each with its number of rows."""
    return [(File(*entry), rows) for *entry, rows in sorted(json.loads(files or "[]"))]


def _version(address: Address, row: Any, entries: Sequence[Sequence[Any]]) -> Version:
    record = json.loads(row.manifest)
    if record.get("rows"):
        ordered = sorted(entries, key=lambda entry: part_order(entry[0].path))
        record["meta"]["rows"] = [count for _, count in ordered]
    return Version(
        bucket=address.bucket,
        shelf=address.shelf,
        name=address.name,
        number=row.number,
        kind=row.kind,
        created=datetime.fromisoformat(row.created).astimezone(timezone.utc),
        size=row.size,
        digest=row.digest,
        files=tuple(file for file, _ in entries),
        meta=record["meta"],
        attributes=record["attributes"],
    )


def _select_id(address: Any) -> sa.Select[tuple[int]]:
    names = ("bucket", "shelf", "name")
    return sa.select(_objects.c.id).where(*(_objects.c[name] == getattr(address, name) for name in names))


def _id(address: Any) -> sa.ScalarSelect[int]:
    return _select_id(address).scalar_subquery()


def _behind(prefix: str) -> str:
    """The first text that comes after all that begin so, by the codes of the characters."""
    code = ord(prefix[-1]) + 1
    if code > sys.maxunicode:
        return prefix + chr(sys.maxunicode)
    return prefix[:-1] + ("\ue000" if 0xD800 <= code < 0xE000 else chr(code))  # UTF-8 has no surrogates
