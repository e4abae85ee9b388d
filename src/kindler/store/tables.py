"""The tables of the catalog, and how a version becomes rows of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import sqlalchemy as sa

from kindler.store.versions import File, as_json

FORMAT = 3

metadata = sa.MetaData()
state = sa.Table(
    "kindler_store",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("format", sa.Integer, nullable=False),
    sa.Column("blobs", sa.Text, nullable=False),
    # Whether there ever was a key: a store is not open to everybody again when its last one is removed.
    sa.Column("protected", sa.Integer, nullable=False, server_default="0"),
)
objects = sa.Table(
    "kindler_objects",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("bucket", sa.Text, nullable=False),
    sa.Column("shelf", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("last", sa.Integer, nullable=False),  # stays when versions are dropped: no number comes twice
    sa.UniqueConstraint("bucket", "shelf", "name"),
)
versions = sa.Table(
    "kindler_versions",
    metadata,
    sa.Column("object", sa.ForeignKey(objects.c.id), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("created", sa.Text, nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("manifest", sa.Text, nullable=False),  # meta and attributes; see `packed`
    sa.Column("base", sa.Integer, nullable=False, server_default="0"),
)
files = sa.Table(
    "kindler_files",
    metadata,
    sa.Column("object", sa.ForeignKey(objects.c.id), primary_key=True),
    sa.Column("first", sa.Integer, primary_key=True),  # the number of the version that added it
    sa.Column("path", sa.Text, primary_key=True),
    sa.Column("sha256", sa.Text, nullable=False, index=True),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("rows", sa.BigInteger),
)
tags = sa.Table(
    "kindler_tags",
    metadata,
    sa.Column("object", sa.Integer, primary_key=True),
    sa.Column("tag", sa.Text, primary_key=True),
    sa.Column("number", sa.Integer, nullable=False),
    sa.ForeignKeyConstraint(
        ["object", "number"], ["kindler_versions.object", "kindler_versions.number"], ondelete="CASCADE"
    ),
)
keys = sa.Table(
    "kindler_keys",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("sha256", sa.Text, nullable=False),
    sa.Column("scopes", sa.Text, nullable=False),
    sa.Column("note", sa.Text, nullable=False),
    sa.Column("created", sa.Text, nullable=False),
    sa.Column("expires", sa.Text),
)
splits = sa.Table(
    "kindler_splits",
    metadata,
    sa.Column("bucket", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("alias", sa.Text, key="tag", primary_key=True),
    sa.Column("rules", sa.Text, nullable=False),
)

# A row of `kindler_files` as a version has it: path, SHA-256, size, and how many rows of data it holds.
Entry: TypeAlias = tuple[str, str, int, int | None]


def packed(
    own: Sequence[File], meta: Mapping[str, Any], attributes: Mapping[str, Any]
) -> tuple[list[Entry], str]:
    """The rows of a version's files, and the rest as text.

    Kinds whose datasets can be appended to say in `meta["rows"]` how many rows each file has. That is a
    column of the files: else each version would repeat the list of all those before it.
    """
    ordered = sorted(own, key=lambda file: part_order(file.path))
    rows = meta.get("rows")
    by_file = (
        isinstance(rows, list)
        and len(rows) == len(ordered)
        and all(count is None or (type(count) is int and 0 <= count < 2**63) for count in rows)
    )
    counts: Sequence[int | None] = rows if by_file and rows is not None else [None] * len(ordered)
    entries = [(f.path, f.sha256, f.size, count) for f, count in zip(ordered, counts, strict=True)]
    record: dict[str, Any] = {"meta": dict(meta), "attributes": dict(attributes)}
    if by_file:
        del record["meta"]["rows"]
        record["rows"] = True
    return entries, as_json(record)


def insert_files(
    connection: sa.Connection, object_id: int, number: int, entries: Sequence[Sequence[Any]]
) -> None:
    """Record the files that a version adds."""
    names = ("path", "sha256", "size", "rows")
    added = {"object": object_id, "first": number}
    if entries:
        rows = [{**added, **dict(zip(names, entry, strict=True))} for entry in entries]
        connection.execute(files.insert(), rows)


def part_order(path: str) -> tuple[int, str]:
    """Parts by their numbers: part-99999 comes before part-100000."""
    return len(path), path
