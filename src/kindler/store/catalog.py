"""The rows behind a store: names, versions, tags, and which blobs they need. One set of statements for SQLite
and PostgreSQL.

A version appears in one transaction, together with its number and its tags, or not at all. Blobs are taken
away only while nobody publishes (`unneeded`), and who publishes looks in the same transaction whether they
are all there; so no version is ever without its bytes, however the two meet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from kindler.errors import ConfigError
from kindler.store.database import Database
from kindler.store.selectors import Selector
from kindler.store.urls import without_secrets
from kindler.store.versions import Address, Draft, File, Manifest, Version, growth

FORMATS = (1, 2)  # since 2, a version may say only what it has more than the one before it
_CHUNK = 500
_LOCK_KEY = 0x6B696E64  # "kind": for PostgreSQL, while tables are made

_tables = sa.MetaData()
_state = sa.Table(
    "kindler_store",
    _tables,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("format", sa.Integer, nullable=False),
    sa.Column("blobs", sa.Text, nullable=False),
)
_objects = sa.Table(
    "kindler_objects",
    _tables,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("bucket", sa.Text, nullable=False),
    sa.Column("shelf", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("last", sa.Integer, nullable=False),  # stays when versions are dropped: no number comes twice
    sa.UniqueConstraint("bucket", "shelf", "name"),
)
_versions = sa.Table(
    "kindler_versions",
    _tables,
    sa.Column("object", sa.ForeignKey(_objects.c.id), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("created", sa.Text, nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("manifest", sa.Text, nullable=False),
)
_VERSION = ["object", "number"]
_needs = sa.Table(
    "kindler_needs",
    _tables,
    sa.Column("object", sa.Integer, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("sha256", sa.Text, primary_key=True, index=True),
    sa.ForeignKeyConstraint(
        _VERSION, ["kindler_versions.object", "kindler_versions.number"], ondelete="CASCADE"
    ),
)
_tags = sa.Table(
    "kindler_tags",
    _tables,
    sa.Column("object", sa.Integer, primary_key=True),
    sa.Column("tag", sa.Text, primary_key=True),
    sa.Column("number", sa.Integer, nullable=False),
    sa.ForeignKeyConstraint(
        _VERSION, ["kindler_versions.object", "kindler_versions.number"], ondelete="CASCADE"
    ),
)
_joined = _versions.join(_objects, _versions.c.object == _objects.c.id)
_BEYOND = 2**31 - 1  # no version has this number
# The one statement that is asked all the time, made once: a version and those before it, newest first. By a
# subquery and not by a join: so the index has the order, and it takes as long for the thousandth version.
_FIND = (
    sa.select(_versions)
    .where(
        _versions.c.object
        == sa.select(_objects.c.id)
        .where(
            _objects.c.bucket == sa.bindparam("bucket"),
            _objects.c.shelf == sa.bindparam("shelf"),
            _objects.c.name == sa.bindparam("name"),
        )
        .scalar_subquery(),
        _versions.c.number <= sa.bindparam("number"),
    )
    .order_by(_versions.c.number.desc())
    .limit(sa.bindparam("count"))
)


class LackingBlobs(Exception):
    """A version cannot be published yet: blobs of it are not there.

    Attributes:
        hashes: Which.
    """

    def __init__(self, hashes: Sequence[str]) -> None:
        self.hashes = tuple(hashes)
        super().__init__(f"{len(hashes)} blobs are lacking")


class OvertakenError(Exception):
    """The newest version is another one than the publisher took it to be.

    Attributes:
        latest: Its number; 0 if there is none.
    """

    def __init__(self, latest: int) -> None:
        self.latest = latest
        super().__init__(f"the newest version is {latest}")


class Catalog:
    """What is in a store.

    Args:
        database: Where the rows are.
        blobs: Where the blobs are said to be; None takes what the catalog remembers.
        new_blobs: Where they are to be if the catalog is new and nothing was said.
    """

    def __init__(self, database: Database, blobs: str | None, new_blobs: str | None = None) -> None:
        self._database = database
        insert = sqlite.insert if database.dialect == "sqlite" else postgresql.insert
        self._insert: Callable[[sa.Table], Any] = insert
        self.blobs = self._open(blobs, new_blobs)

    def publish(
        self,
        address: Address,
        draft: Draft,
        *,
        has: Callable[[str], bool],
        tags: Sequence[str] = (),
        after: int | None = None,
        grows: Version | None = None,
    ) -> Version:
        """Make the draft the newest version of its name.

        Args:
            address: Where.
            draft: What.
            has: Whether a blob is there.
            tags: Tags that move to it.
            after: The newest version must be this one (0: there must be none).
            grows: The version with the number `after`, if the draft has all that it has.

        Raises:
            LackingBlobs: Some blobs are not there.
            OvertakenError: The newest version is not `after`.
        """
        created = datetime.now(timezone.utc).isoformat()
        said = Manifest(draft.files, dict(draft.meta), dict(draft.attributes))
        if grows is not None:
            self._allow_growth()
        with self._database.writing() as connection:
            connection.execute(sa.select(_state.c.id).with_for_update(read=True)).all()
            object_id, number = self._next(connection, address)
            latest = connection.scalar(
                sa.select(sa.func.max(_versions.c.number)).where(_versions.c.object == object_id)
            )
            if after is not None and after != (latest or 0):
                raise OvertakenError(latest or 0)
            kept = self._grown(connection, object_id, draft, grows) or said
            hashes = sorted({file.sha256 for file in kept.files})
            known = self._needed(connection, hashes)
            lacking = [sha256 for sha256 in hashes if sha256 not in known and not has(sha256)]
            if lacking:
                raise LackingBlobs(lacking)
            connection.execute(
                _versions.insert().values(
                    object=object_id,
                    number=number,
                    kind=draft.kind,
                    created=created,
                    size=draft.size,
                    digest=draft.digest,
                    manifest=kept.text(),
                )
            )
            if hashes:
                rows = [{"object": object_id, "number": number, "sha256": sha256} for sha256 in hashes]
                connection.execute(_needs.insert(), rows)
            for tag in tags:
                self._move(connection, object_id, tag, number)
        return Version.restored(
            address,
            number=number,
            kind=draft.kind,
            created=created,
            size=draft.size,
            digest=draft.digest,
            manifest=Manifest.read(said.text()),  # as it will be read: what JSON has
        )

    def find(self, address: Address, selector: Selector) -> Version | None:
        """The version that is meant, if it is there."""
        with self._database.reading() as connection:
            ref = selector.ref
            number = self._tags(connection, address).get(ref) if isinstance(ref, str) else ref
            if number is None and ref is not None:
                return None
            known = {"bucket": address.bucket, "shelf": address.shelf, "name": address.name}
            wanted = {**known, "number": _BEYOND if number is None else min(number, _BEYOND)}
            rows = connection.execute(_FIND, {**wanted, "count": selector.back + 1}).all()
            if len(rows) <= selector.back or number not in (None, rows[0].number):
                return None
            return self._resolved(connection, address, rows[-1])

    def versions(self, address: Address) -> list[Version]:
        """All versions of a name, oldest first."""
        wanted = sa.select(_versions).select_from(_joined).where(*_is(address)).order_by(_versions.c.number)
        versions: list[Version] = []
        before: Manifest | None = None
        with self._database.reading() as connection:
            for row in connection.execute(wanted):
                said = Manifest.read(row.manifest)
                if before is not None and said.since is not None:
                    joined = said.after(replace(before, meta=_copied(before.meta)))
                    said = replace(joined, files=sorted(joined.files, key=_by_path))
                versions.append(_version(address, row, said))
                before = said
        return versions

    def history(self, address: Address) -> list[tuple[int, datetime]]:
        """The numbers of all versions of a name, oldest first, and when they were published."""
        own = sa.select(_objects.c.id).where(*_is(address)).scalar_subquery()
        wanted = sa.select(_versions.c.number, _versions.c.created).where(_versions.c.object == own)
        with self._database.reading() as connection:
            rows = connection.execute(wanted.order_by(_versions.c.number)).all()
        return [(row.number, datetime.fromisoformat(row.created)) for row in rows]

    def needs(self, after: str, limit: int) -> list[str]:
        """Hashes of blobs that some version needs, in order, after this one; at most so many."""
        wanted = sa.select(_needs.c.sha256).where(_needs.c.sha256 > after).distinct()
        with self._database.reading() as connection:
            return list(connection.scalars(wanted.order_by(_needs.c.sha256).limit(limit)))

    def users(self, sha256: str, limit: int) -> list[str]:
        """Versions that need a blob, such as "default/models/net@3"; at most so many."""
        joined = _needs.join(_objects, _needs.c.object == _objects.c.id)
        wanted = sa.select(_objects.c.bucket, _objects.c.shelf, _objects.c.name, _needs.c.number)
        wanted = wanted.select_from(joined).where(_needs.c.sha256 == sha256).limit(limit)
        with self._database.reading() as connection:
            rows = connection.execute(wanted).all()
        return sorted(f"{row.bucket}/{row.shelf}/{row.name}@{row.number}" for row in rows)

    def compact(self) -> tuple[int, int]:
        """Give back the room that removed rows took; returns the bytes before and after, 0 if unknown."""
        return self._database.compact()

    def numbers(self, address: Address, limit: int) -> list[int]:
        """The numbers of the newest versions of a name, oldest first, at most so many."""
        # By a subquery, as in _FIND: with a join, SQLite reads all versions to find that there is none.
        own = sa.select(_objects.c.id).where(*_is(address)).scalar_subquery()
        wanted = sa.select(_versions.c.number).where(_versions.c.object == own)
        with self._database.reading() as connection:
            found = list(connection.scalars(wanted.order_by(_versions.c.number.desc()).limit(limit)))
        return found[::-1]

    def newest(
        self, bucket: str, shelf: str, prefix: str = "", *, after: str = "", limit: int | None = None
    ) -> list[Version]:
        """The newest version of each name that begins so and comes after `after`, by name."""
        newest = _versions.alias()
        wanted = self._names(sa.select(_objects.c.name, _versions), bucket, shelf, prefix, after, limit)
        wanted = wanted.select_from(_joined).where(
            _versions.c.number
            == sa.select(sa.func.max(newest.c.number))
            .where(newest.c.object == _objects.c.id)
            .scalar_subquery()
        )
        with self._database.reading() as connection:
            rows = connection.execute(wanted).all()
            return [self._resolved(connection, Address(bucket, shelf, row.name), row) for row in rows]

    def names(
        self, bucket: str, shelf: str, prefix: str = "", *, after: str = "", limit: int | None = None
    ) -> list[str]:
        """The names alone."""
        wanted = self._names(sa.select(_objects.c.name), bucket, shelf, prefix, after, limit).where(
            sa.exists().where(_versions.c.object == _objects.c.id)
        )
        with self._database.reading() as connection:
            return list(connection.scalars(wanted))

    def all_tags(
        self, bucket: str, shelf: str, first: str | None = None, last: str | None = None
    ) -> dict[str, dict[str, int]]:
        """The tags of all names that have any, from the first to the last if they are given."""
        joined = _tags.join(_objects, _tags.c.object == _objects.c.id)
        wanted = sa.select(_objects.c.name, _tags.c.tag, _tags.c.number).select_from(joined)
        wanted = wanted.where(_objects.c.bucket == bucket, _objects.c.shelf == shelf)
        if first is not None and last is not None:
            wanted = wanted.where(self._name >= first, self._name <= last)
        tags: dict[str, dict[str, int]] = {}
        with self._database.reading() as connection:
            for row in connection.execute(wanted):
                tags.setdefault(row.name, {})[row.tag] = row.number
        return tags

    def buckets(self) -> list[str]:
        """The buckets that hold something."""
        with self._database.reading() as connection:
            return sorted(connection.scalars(sa.select(_objects.c.bucket).select_from(_joined).distinct()))

    def drop(self, address: Address, number: int | None = None, *, forget: bool = False) -> list[int]:
        """Take a version away, or all of a name; returns which. One that is forgotten begins with 1 again."""
        with self._database.writing() as connection:
            ids = sa.select(_objects.c.id).where(*_is(address)).scalar_subquery()
            which = _versions.c.object == ids
            # Nobody publishes this name meanwhile: the next version might grow on the one that goes.
            object_id = connection.scalar(sa.select(_objects.c.id).where(*_is(address)).with_for_update())
            if number is not None:
                self._hand_on(connection, object_id, number)
                which &= _versions.c.number == number
            gone = sorted(connection.scalars(_versions.delete().where(which).returning(_versions.c.number)))
            if forget:
                connection.execute(_objects.delete().where(*_is(address)))
            return gone

    def tags(self, address: Address) -> dict[str, int]:
        """The tags of a name, and the numbers they stand at."""
        with self._database.reading() as connection:
            return self._tags(connection, address)

    def move_tag(self, version: Version, tag: str) -> bool:
        """Make the tag stand at the version; whether the version is there."""
        with self._database.writing() as connection:
            wanted = sa.select(_versions.c.object).select_from(_joined).where(*_is(version.address))
            object_id = connection.scalar(wanted.where(_versions.c.number == version.number))
            if object_id is not None:
                self._move(connection, object_id, tag, version.number)
        return object_id is not None

    def remove_tag(self, address: Address, tag: str) -> bool:
        """Take a tag away; whether it was there."""
        with self._database.writing() as connection:
            ids = sa.select(_objects.c.id).where(*_is(address)).scalar_subquery()
            gone = connection.execute(_tags.delete().where(_tags.c.object == ids, _tags.c.tag == tag))
            return bool(gone.rowcount)

    @contextmanager
    def unneeded(self, hashes: Sequence[str]) -> Iterator[list[str]]:
        """Which of the blobs no version needs; while the block runs, nobody publishes."""
        with self._database.writing() as connection:
            connection.execute(sa.select(_state.c.id).with_for_update()).all()
            needed = self._needed(connection, hashes)
            yield [sha256 for sha256 in hashes if sha256 not in needed]

    def close(self) -> None:
        """Close the connections."""
        self._database.close()

    def _open(self, blobs: str | None, new_blobs: str | None) -> str:
        with self._database.reading() as connection:
            # Before it is asked for: PostgreSQL ends a transaction in which a table was missing.
            exists = sa.inspect(connection).has_table(_state.name)
            row = connection.execute(sa.select(_state)).first() if exists else None
        if row is None:
            row = self._create(blobs or new_blobs)
        if row.format not in FORMATS:
            known = " and ".join(map(str, FORMATS))
            raise ConfigError(
                f"the store's catalog has the format {row.format}; this version of Kindler reads {known}."
            )
        self._format = row.format
        known = str(row.blobs)
        if blobs is not None and blobs.partition("?")[0] != known.partition("?")[0]:
            raise ConfigError(
                f"the store's blobs are at {known.partition('?')[0]}, not at {blobs.partition('?')[0]}.\n"
                "Hint: leave blobs=... out of the URL; the catalog records it."
            )
        return blobs or known

    def _create(self, blobs: str | None) -> Any:
        if blobs is None:
            raise ConfigError(
                "this store is new, and its URL does not say where to put the blobs.\n"
                "Hint: add ?blobs=s3://bucket/prefix or ?blobs=file:///folder."
            )
        with self._database.writing() as connection:
            self._database.make(connection, _tables, _LOCK_KEY)
            first = self._insert(_state).values(id=1, format=max(FORMATS), blobs=without_secrets(blobs))
            connection.execute(first.on_conflict_do_nothing())
            return connection.execute(sa.select(_state)).one()

    def _allow_growth(self) -> None:
        """Let no older Kindler read what it would take for all of a version."""
        if self._format < max(FORMATS):
            with self._database.writing() as connection:
                connection.execute(_state.update().values(format=max(FORMATS)))
            self._format = max(FORMATS)

    def _grown(
        self, connection: sa.Connection, object_id: int, draft: Draft, before: Version | None
    ) -> Manifest | None:
        if before is None:
            return None
        row = connection.execute(
            sa.select(_versions.c.manifest).where(
                _versions.c.object == object_id, _versions.c.number == before.number
            )
        ).one()
        since = Manifest.read(row.manifest).since
        return growth(draft, before, before.number if since is None else since)

    def _resolved(self, connection: sa.Connection, address: Address, row: Any) -> Version:
        """The version of a row, with all that it grew on."""
        said = Manifest.read(row.manifest)
        if said.since is None:
            return _version(address, row, said)
        wanted = (
            sa.select(_versions.c.manifest)
            .where(_versions.c.object == row.object, _versions.c.number.between(said.since, row.number))
            .order_by(_versions.c.number)
        )
        files: list[File] = []
        whole: Manifest | None = None
        for text in connection.scalars(wanted):
            one = Manifest.read(text)
            whole = one if whole is None else one.after(replace(whole, files=()))
            files.extend(one.files)
        return _version(address, row, replace(whole or said, files=sorted(files, key=_by_path)))

    def _hand_on(self, connection: sa.Connection, object_id: int | None, number: int) -> None:
        """Before a version is dropped: give what it has to the next one, if that grows on it."""
        wanted = sa.select(_versions.c.number, _versions.c.manifest).where(_versions.c.object == object_id)
        own = connection.execute(wanted.where(_versions.c.number == number)).first()
        later = wanted.where(_versions.c.number > number).order_by(_versions.c.number).limit(1)
        heir = connection.execute(later).first()
        if own is None or heir is None or Manifest.read(heir.manifest).since is None:
            return
        joined = Manifest.read(heir.manifest).after(Manifest.read(own.manifest))
        which = (_versions.c.object == object_id) & (_versions.c.number == heir.number)
        connection.execute(_versions.update().where(which).values(manifest=joined.text()))
        rows = [
            {"object": object_id, "number": heir.number, "sha256": sha256}
            for sha256 in sorted({file.sha256 for file in joined.files})
        ]
        if rows:
            connection.execute(self._insert(_needs).on_conflict_do_nothing(), rows)

    def _names(self, wanted: Any, bucket: str, shelf: str, prefix: str, after: str, limit: int | None) -> Any:
        name = self._name
        wanted = wanted.where(_objects.c.bucket == bucket, _objects.c.shelf == shelf).order_by(name)
        if prefix:
            # The range is what the index is used for: without its end, all names behind it would be read.
            wanted = wanted.where(_objects.c.name.startswith(prefix, autoescape=True), name < _behind(prefix))
        if after or prefix:  # one bound: of two, SQLite would use the first for the index
            wanted = wanted.where(name >= prefix if prefix > after else name > after)
        return wanted if limit is None else wanted.limit(limit)

    @property
    def _name(self) -> Any:
        # By the codes of the characters, as Python sorts; databases do not agree on an order of text.
        return _objects.c.name if self._database.dialect == "sqlite" else _objects.c.name.collate("C")

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
        made = self._insert(_tags).values(object=object_id, tag=tag, number=number)
        connection.execute(
            made.on_conflict_do_update(index_elements=["object", "tag"], set_={"number": number})
        )

    def _tags(self, connection: sa.Connection, address: Address) -> dict[str, int]:
        joined = _tags.join(_objects, _tags.c.object == _objects.c.id)
        wanted = sa.select(_tags.c.tag, _tags.c.number).select_from(joined).where(*_is(address))
        return {row.tag: row.number for row in connection.execute(wanted)}

    def _needed(self, connection: sa.Connection, hashes: Sequence[str]) -> set[str]:
        needed: set[str] = set()
        for start in range(0, len(hashes), _CHUNK):
            some = hashes[start : start + _CHUNK]
            needed.update(
                connection.scalars(sa.select(_needs.c.sha256).where(_needs.c.sha256.in_(some)).distinct())
            )
        return needed


def _is(address: Address) -> tuple[sa.ColumnElement[bool], ...]:
    return (
        _objects.c.bucket == address.bucket,
        _objects.c.shelf == address.shelf,
        _objects.c.name == address.name,
    )


def _behind(prefix: str) -> str:
    """The first text that comes after all that begin so, by the codes of the characters."""
    code = ord(prefix[-1]) + 1
    if code > sys.maxunicode:
        return prefix + chr(sys.maxunicode)
    return prefix[:-1] + ("\ue000" if 0xD800 <= code < 0xE000 else chr(code))  # UTF-8 has no surrogates


def _by_path(file: File) -> str:
    return file.path


def _copied(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, list) else value for key, value in meta.items()}


def _version(address: Address, row: Any, said: Manifest) -> Version:
    return Version.restored(
        address,
        number=row.number,
        kind=row.kind,
        created=row.created,
        size=row.size,
        digest=row.digest,
        manifest=said,
    )
