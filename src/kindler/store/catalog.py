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

from kindler.errors import ConfigError, NotFoundError, StoreError
from kindler.store import tables as t
from kindler.store import urls
from kindler.store._database import Database
from kindler.store._migration import upgrade
from kindler.store.names import Selector, check_tag, is_hidden, literal_prefix, matches
from kindler.store.versions import Address, File, OvertakenError, Version

_CHUNK = 500
_PAGE = 100  # read beyond those that are asked for, as some may not be listed
_LOCK_KEY = 0x6B696E64  # "kind": for PostgreSQL, while tables are made

_object, _version, _file, _tag, _state = t.objects.c, t.versions.c, t.files.c, t.tags.c, t.state.c
_joined = t.versions.join(t.objects, _version.object == _object.id)
_needs_file = (
    (_version.object == _file.object) & (_version.base <= _file.first) & (_version.number >= _file.first)
)
_BEYOND = 2**31 - 1  # no version has this number
_ANY = SimpleNamespace(**{name: sa.bindparam(name) for name in ("bucket", "shelf", "name")})  # an address


class Catalog:
    """What is in the store at a URL; `blobs` is the URL of its blobs."""

    def __init__(self, url: str) -> None:
        place = urls.parse(url)
        self.database = Database(place.catalog)
        is_sqlite = self.database.dialect == "sqlite"
        self._insert: Callable[[sa.Table], Any] = sqlite.insert if is_sqlite else postgresql.insert
        # By the codes of the characters, as Python sorts; databases do not agree on an order of text.
        self._name: Any = _object.name if is_sqlite else _object.name.collate("C")
        entry = (_file.path, _file.sha256, _file.size, _file.rows)
        listed: Any = (
            sa.func.json_group_array(sa.func.json_array(*entry))
            if is_sqlite
            else sa.func.json_agg(sa.func.json_build_array(*entry))
        )
        files = sa.select(sa.cast(listed, sa.Text)).where(_needs_file).correlate(t.versions)
        self._columns = [*t.versions.c, files.scalar_subquery().label("files")]
        # The one statement that is asked all the time, made once: a version and those before it, newest
        # first. By a subquery and not by a join: so the index has the order, and it takes as long for the
        # thousandth version.
        find = (
            sa.select(*self._columns)
            .where(_version.object == _id(_ANY), _version.number <= sa.bindparam("number"))
            .order_by(_version.number.desc())
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
        """Make the draft the newest version of its name, if `has` finds its blobs."""
        entries, manifest = t.packed(draft.files, draft.meta, draft.attributes)
        with self.database.writing() as connection:
            connection.execute(sa.select(_state.id).with_for_update(read=True)).all()
            object_id, number = self._next(connection, draft.address)
            latest = connection.execute(
                sa.select(_version.number, _version.base)
                .where(_version.object == object_id)
                .order_by(_version.number.desc())
                .limit(1)
            ).first()
            newest = latest.number if latest else 0
            if after is not None and after != newest:
                raise OvertakenError(f"the newest version is {newest}")
            base = number
            if grows is not None and latest is not None and grows.number == newest:
                had = set(t.packed(grows.files, grows.meta, {})[0])
                if had <= set(entries):
                    base, entries = latest.base, [entry for entry in entries if entry not in had]
            hashes = sorted({sha256 for _, sha256, _, _ in entries})
            known = self._needed(connection, hashes)
            if lacking := [sha256 for sha256 in hashes if sha256 not in known and not has(sha256)]:
                raise StoreError(
                    f"{draft.name!r} cannot be published: {len(lacking)} of its blobs were removed.\n"
                    "Hint: sweep with a longer grace_s, and do not drop a version while it is being copied."
                )
            version = replace(draft, number=number, created=datetime.now(timezone.utc))
            connection.execute(
                t.versions.insert().values(
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
            t.insert_files(connection, object_id, number, entries)
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
        return _read_version(address, rows[-1], _entries(rows[-1].files))

    def versions(self, address: Address) -> list[Version]:
        """All versions of a name, oldest first; none for a name that does not exist."""
        own = _id(address)
        with self.database.reading() as connection:
            # Files last: so those of each version are among them.
            rows = connection.execute(
                sa.select(t.versions).where(_version.object == own).order_by(_version.number)
            ).all()
            query = sa.select(*list(t.files.c)[1:]).where(_file.object == own)
            added = [(row.first, (File(*row[1:4]), row.rows)) for row in connection.execute(query)]
        added.sort(key=lambda row: row[1][0].path)
        return [
            _read_version(address, row, [entry for first, entry in added if row.base <= first <= row.number])
            for row in rows
        ]

    def history(self, address: Address, limit: int | None = None) -> list[tuple[int, datetime]]:
        """The numbers of the newest versions of a name, oldest first, and when they were published."""
        # By a subquery, as in `_find`: with a join, SQLite reads all versions to find that there is none.
        query = sa.select(_version.number, _version.created).where(_version.object == _id(address))
        rows = self.database.rows(query.order_by(_version.number.desc()).limit(limit))
        return [(row.number, datetime.fromisoformat(row.created)) for row in rows[::-1]]

    def hashes(self, after: str, limit: int) -> list[str]:
        """Hashes of needed blobs, in order, after this one."""
        query = sa.select(_file.sha256).where(_file.sha256 > after).distinct()
        return self.database.values(query.order_by(_file.sha256).limit(limit))

    def users(self, sha256: str, limit: int) -> list[str]:
        """Versions that need a blob, such as "default/models/net@3"; at most `limit`."""
        joined = t.files.join(t.versions, _needs_file).join(t.objects, _file.object == _object.id)
        query = sa.select(_object.bucket, _object.shelf, _object.name, _version.number)
        query = query.select_from(joined).where(_file.sha256 == sha256).distinct().limit(limit)
        rows = self.database.rows(query)
        return sorted(f"{row.bucket}/{row.shelf}/{row.name}@{row.number}" for row in rows)

    def newest(
        self,
        bucket: str,
        shelf: str,
        pattern: str = "**",
        *,
        hidden: bool = True,
        kind: str | None = None,
        after: str = "",
        limit: int | None = None,
    ) -> list[Version]:
        """The newest version of each name that a glob matches, by name; see `Shelf.list`."""
        other = t.versions.alias()
        newest = sa.select(sa.func.max(other.c.number)).where(other.c.object == _object.id)
        query = sa.select(_object.name, *self._columns).select_from(_joined)
        query = query.where(_version.number == newest.scalar_subquery())
        if kind is not None:
            query = query.where(_version.kind == kind)
        rows = self._listed(query, bucket, shelf, pattern, hidden, after, limit)
        return [_read_version(Address(bucket, shelf, row.name), row, _entries(row.files)) for row in rows]

    def names(
        self,
        bucket: str,
        shelf: str,
        pattern: str = "**",
        *,
        hidden: bool = True,
        after: str = "",
        limit: int | None = None,
    ) -> list[str]:
        """The names alone, which takes less time."""
        query = sa.select(_object.name).where(sa.exists().where(_version.object == _object.id))
        return [row.name for row in self._listed(query, bucket, shelf, pattern, hidden, after, limit)]

    def all_tags(
        self, bucket: str, shelf: str, first: str | None = None, last: str | None = None
    ) -> dict[str, dict[str, int]]:
        """The tags of all names of a shelf that have any, and the numbers they point to.

        With `first` and `last`, only of names from the one to the other: those of a page.
        """
        joined = t.tags.join(t.objects, _tag.object == _object.id)
        query = sa.select(_object.name, _tag.tag, _tag.number).select_from(joined)
        query = query.where(_object.bucket == bucket, _object.shelf == shelf)
        if first is not None and last is not None:
            query = query.where(self._name >= first, self._name <= last)
        by_name: dict[str, dict[str, int]] = {}
        for row in self.database.rows(query):
            by_name.setdefault(row.name, {})[row.tag] = row.number
        return by_name

    def buckets(self) -> list[str]:
        """The buckets that are not empty."""
        return sorted(self.database.values(sa.select(_object.bucket).select_from(_joined).distinct()))

    def drop(self, address: Address, number: int | None = None, *, forget: bool = False) -> list[int]:
        """Delete a name with all its versions, or one of them; returns their numbers.

        Bytes that nothing needs any more go with the next sweep. A forgotten name begins with 1 again.
        """
        with self.database.writing() as connection:
            # Nobody publishes this name meanwhile: the next version might grow on the one that goes.
            object_id = connection.scalar(_select_id(address).with_for_update())
            unneeded = _file.object == object_id
            which = _version.object == object_id
            if number is not None:
                # The version before has all older files of the same base.
                before = sa.select(sa.func.coalesce(sa.func.max(_version.number), 0)).where(
                    which, _version.number < number
                )
                which &= _version.number == number
                unneeded &= _file.first.between(before.scalar_subquery() + 1, number)
                unneeded &= ~sa.exists().where(_needs_file).correlate(t.files)
            gone = sorted(connection.scalars(t.versions.delete().where(which).returning(_version.number)))
            if gone:
                connection.execute(t.files.delete().where(unneeded))
            if forget:
                connection.execute(t.objects.delete().where(_object.id == object_id))
            return gone

    def tags(self, address: Address) -> dict[str, int]:
        """The tags of a name, and the numbers they point to."""
        with self.database.reading() as connection:
            return self._tags(connection, address)

    def tag(self, version: Version, tag: str) -> None:
        """Move a tag to a version; a NotFoundError if it was dropped."""
        check_tag(tag)
        with self.database.writing() as connection:
            query = sa.select(_version.object).where(_version.object == _id(version.address))
            object_id = connection.scalar(query.where(_version.number == version.number))
            if object_id is None:
                raise NotFoundError(what="version", name=str(version))
            self._move(connection, object_id, tag, version.number)

    def untag(self, address: Address, tag: str) -> None:
        """Remove a tag; a NotFoundError if there is none."""
        with self.database.writing() as connection:
            which = (_tag.object == _id(address)) & (_tag.tag == tag)
            if not connection.execute(t.tags.delete().where(which)).rowcount:
                there = sorted(self._tags(connection, address))
                raise NotFoundError(what=f"tag of {address.name!r}", name=tag, available=there)

    @contextmanager
    def unneeded(self, hashes: Sequence[str]) -> Iterator[list[str]]:
        """Which of the blobs no version needs; while the block runs, nobody publishes."""
        with self.database.writing() as connection:
            connection.execute(sa.select(_state.id).with_for_update()).all()
            needed = self._needed(connection, hashes)
            yield [sha256 for sha256 in hashes if sha256 not in needed]

    def _open(self, place: urls.Place) -> str:
        columns = sa.select(_state.id, _state.format, _state.blobs)  # which every format has
        with self.database.reading() as connection:
            # Before it is asked for: PostgreSQL ends a transaction in which a table was missing.
            exists = sa.inspect(connection).has_table(t.state.name)
            row = connection.execute(columns).first() if exists else None
        if row is None or row.format < t.FORMAT:
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
                    protected = sa.inspect(connection).has_table(t.keys.name)  # made before the store was
                    t.metadata.create_all(connection)
                    blobs = urls.without_secrets(place.blobs or str(place.new_blobs))
                    first = {"id": 1, "format": t.FORMAT, "blobs": blobs, "protected": int(protected)}
                    connection.execute(self._insert(t.state).values(first).on_conflict_do_nothing())
                else:
                    upgrade(connection)
                row = connection.execute(columns).one()
        if row.format != t.FORMAT:
            raise ConfigError(
                f"the store's catalog has the format {row.format}; this version of Kindler reads up to"
                f" {t.FORMAT}.\n"
                "Hint: update Kindler; a newer version has opened this store."
            )
        known, wanted = (str(url).partition("?")[0] for url in (row.blobs, place.blobs or row.blobs))
        if wanted != known:
            raise ConfigError(
                f"the store's blobs are at {known}, not at {wanted}.\n"
                "Hint: leave blobs=... out of the URL; the catalog records it."
            )
        return place.blobs or str(row.blobs)

    def _listed(
        self,
        query: sa.Select[Any],
        bucket: str,
        shelf: str,
        pattern: str,
        hidden: bool,
        after: str,
        limit: int | None,
    ) -> list[Any]:
        """The rows whose names a glob matches, read in pieces: a page of a large store takes little time."""
        if limit is not None and limit < 1:
            raise ConfigError(f"limit={limit}: must be at least 1.")
        name, prefix = self._name, literal_prefix(pattern)
        query = query.where(_object.bucket == bucket, _object.shelf == shelf).order_by(name)
        if prefix:
            # The range is what the index is used for: without its end, all names behind it would be read.
            query = query.where(_object.name.startswith(prefix, autoescape=True), name < _behind(prefix))
        items: list[Any] = []
        count = None if limit is None else _PAGE + limit
        while True:
            # One bound: of two, SQLite would use the first for the index.
            rows = self.database.rows(
                query.where(name >= prefix if prefix > after else name > after).limit(count)
            )
            items += [
                row for row in rows if (hidden or not is_hidden(row.name)) and matches(pattern, row.name)
            ]
            if limit is None or count is None or len(items) >= limit or len(rows) < count:
                return items[:limit]
            after, count = rows[-1].name, 4 * count

    def _next(self, connection: sa.Connection, address: Address) -> tuple[int, int]:
        statement = self._insert(t.objects).values(**asdict(address), last=1)
        statement = statement.on_conflict_do_update(
            index_elements=["bucket", "shelf", "name"], set_={"last": _object.last + 1}
        ).returning(_object.id, _object.last)
        row = connection.execute(statement).one()
        return row.id, row.last

    def _move(self, connection: sa.Connection, object_id: int, tag: str, number: int) -> None:
        row = self._insert(t.tags).values(object=object_id, tag=tag, number=number)
        connection.execute(
            row.on_conflict_do_update(index_elements=["object", "tag"], set_={"number": number})
        )

    def _tags(self, connection: sa.Connection, address: Address) -> dict[str, int]:
        query = sa.select(_tag.tag, _tag.number).where(_tag.object == _id(address))
        return {row.tag: row.number for row in connection.execute(query)}

    def _needed(self, connection: sa.Connection, hashes: Sequence[str]) -> set[str]:
        needed: set[str] = set()
        for start in range(0, len(hashes), _CHUNK):
            some = hashes[start : start + _CHUNK]
            needed.update(
                connection.scalars(sa.select(_file.sha256).where(_file.sha256.in_(some)).distinct())
            )
        return needed


def _entries(files: str | None) -> list[tuple[File, int | None]]:
    """The files of a version by path, each with its number of rows."""
    return [(File(*entry), rows) for *entry, rows in sorted(json.loads(files or "[]"))]


def _read_version(address: Address, row: Any, entries: Sequence[Sequence[Any]]) -> Version:
    record = json.loads(row.manifest)
    if record.get("rows"):
        ordered = sorted(entries, key=lambda entry: t.part_order(entry[0].path))
        record["meta"]["rows"] = [count for _, count in ordered]
    return Version(
        **asdict(address),
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
    return sa.select(_object.id).where(*(_object[name] == getattr(address, name) for name in names))


def _id(address: Any) -> sa.ScalarSelect[int]:
    return _select_id(address).scalar_subquery()


def _behind(prefix: str) -> str:
    """The first text that comes after all that begin so, by the codes of the characters."""
    code = ord(prefix[-1]) + 1
    if code > sys.maxunicode:
        return prefix + chr(sys.maxunicode)
    return prefix[:-1] + ("\ue000" if 0xD800 <= code < 0xE000 else chr(code))  # UTF-8 has no surrogates
