"""Catalogs of the formats 1 and 2, made into one of the format 3.

There, the manifest of a version had its files, too. Since format 2, a version that only added to the one
before it had only what was new: `since` was set, `files` had the new files, and the lists of `meta` that are
named in `grown` the new items. `kindler_needs` had the blobs of each version, and keys and splits had tables
once there were some.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from kindler.store import tables
from kindler.store.versions import File


def upgrade(connection: sa.Connection) -> None:
    """Rewrite all rows, in a transaction that writes; nothing happens if another process has done so."""
    if connection.exec_driver_sql("SELECT format FROM kindler_store").scalar_one() >= tables.FORMAT:
        return
    protected = int(sa.inspect(connection).has_table(tables.keys.name))
    for column in ("kindler_store ADD COLUMN protected", "kindler_versions ADD COLUMN base"):
        connection.exec_driver_sql(f"ALTER TABLE {column} INTEGER DEFAULT 0 NOT NULL")
    tables.metadata.create_all(connection)
    rows = connection.exec_driver_sql(
        "SELECT object, number, manifest FROM kindler_versions ORDER BY object, number"
    ).all()
    for object_id, versions in groupby(rows, key=lambda row: int(row.object)):
        _upgrade_object(connection, object_id, versions)
    connection.exec_driver_sql("DROP TABLE kindler_needs")
    connection.execute(
        sa.text("UPDATE kindler_store SET format = :format, protected = :protected"),
        {"format": tables.FORMAT, "protected": protected},
    )


def _upgrade_object(connection: sa.Connection, object_id: int, versions: Any) -> None:
    files: list[File] = []
    meta: dict[str, Any] = {}
    before: set[tables.Entry] = set()
    base, changes = 0, []
    for row in versions:
        record = json.loads(row.manifest)
        own = [File(*entry) for entry in record["files"]]
        grows = record.get("since") is not None
        files = [*files, *own] if grows else own
        grown = {key: [*meta[key], *record["meta"][key]] for key in record.get("grown", ()) if grows}
        meta = record["meta"] | grown
        entries, manifest = tables.packed(files, meta, record["attributes"])
        added = set(entries)
        if grows and before <= added:
            added -= before
        else:
            base = row.number
        tables.insert_files(connection, object_id, row.number, sorted(added, key=lambda entry: entry[0]))
        changes.append({"object": object_id, "number": row.number, "manifest": manifest, "base": base})
        before = set(entries)
    statement = "UPDATE kindler_versions SET manifest = :manifest, base = :base"
    connection.execute(sa.text(f"{statement} WHERE object = :object AND number = :number"), changes)
