"""Snapshots of an Iceberg table, by the package pyiceberg."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kindler.data.file_view import Storage
from kindler.data.tables import USE_SPARK, LiveFile, Table, TableFiles, UnreadableError, library
from kindler.errors import ConfigError


def files(table: Table) -> TableFiles:
    opened = _opened(table)
    snapshot = _snapshot(table, opened)
    number = getattr(snapshot, "snapshot_id", None)
    table.chosen = {"format": "iceberg", "name": table.place(), "uri": opened.location(), "snapshot": number}
    newest = table.snapshot is None and table.as_of is None  # which has the table's columns, not its own
    scan = opened.scan(snapshot_id=None if newest else number)
    if table.since is not None:
        table.chosen["since"] = table.since
    tasks = [] if snapshot is None else list(_tasks(table, opened, snapshot, scan))
    columns = scan.projection()
    schema = library("pyiceberg.io.pyarrow", table, extra="iceberg").schema_to_pyarrow(columns)
    live = [_live(table, opened, task, columns, schema) for task in tasks]
    storage = (
        None
        if all(file.path.startswith("/") for file in live)
        else _Files(opened.location(), dict(opened.io.properties))
    )
    mapped = {f.field_id: list(f.names) for f in opened.name_mapping() or ()}
    return TableFiles(
        schema,
        live,
        {c.name: mapped[c.field_id] for c in columns.fields if c.field_id in mapped},
        {
            c.name: pa.scalar(c.initial_default, schema.field(c.name).type)
            for c in columns.fields
            if c.initial_default is not None
        },
        storage,
    )


@dataclass(frozen=True, slots=True)
class _Files(Storage):
    """Files as pyiceberg opens them, with the properties of the catalog and the user's."""

    location: str
    properties: dict[str, str] = field(repr=False)

    def open(self, file: str) -> Any:
        from pyiceberg.io import load_file_io

        return load_file_io(self.properties, self.location).new_input(file).open()


def _opened(table: Table) -> Any:
    if not table.is_path():
        catalog, _, name = table.name.partition(".")
        if not name:
            raise ConfigError(f"{table!r}: there is no such path, and a name in a catalog has dots.")
        return (
            library("pyiceberg.catalog", table, extra="iceberg")
            .load_catalog(catalog, **table.options)
            .load_table(name)
        )
    static = library("pyiceberg.table", table, extra="iceberg").StaticTable
    try:
        return static.from_metadata(table.uri(), table.options)
    except FileNotFoundError:
        raise ConfigError(
            f"{table!r}: only its catalog knows the newest version of this Iceberg table.\n"
            "Hint: pass kindler.Table('catalog.namespace.table'), or the path of its newest"
            " metadata/....metadata.json; or read it with Spark and pass the DataFrame."
        ) from None


def _snapshot(table: Table, opened: Any) -> Any:
    wanted = table.snapshot
    if wanted is None and table.as_of is None:
        return opened.current_snapshot()
    if table.as_of is not None:
        found = opened.snapshot_as_of_timestamp(int(table.as_of.timestamp() * 1000))
    else:
        found = opened.snapshot_by_name(wanted) if isinstance(wanted, str) else opened.snapshot_by_id(wanted)
    if found is None:
        there = [*sorted(opened.refs()), *(snapshot.snapshot_id for snapshot in opened.snapshots()[-10:])]
        raise ConfigError(f"{table!r}: the table has no such snapshot; it has {there}.")
    return found


def _tasks(table: Table, opened: Any, snapshot: Any, scan: Any) -> Iterator[Any]:
    if table.since is None:
        yield from scan.plan_files()
        return
    between, step = [], snapshot
    while step is not None and step.snapshot_id != table.since:
        between.append(step)
        step = opened.snapshot_by_id(step.parent_snapshot_id) if step.parent_snapshot_id else None
    if step is None:
        raise ConfigError(
            f"{table!r}: snapshot {table.since} is not among those before {snapshot.snapshot_id}."
        )
    for step in between:
        # A replacement rewrites files, without a change of rows.
        if step.summary is None or step.summary.operation.value not in ("append", "replace"):
            raise ConfigError(
                f"{table!r}: snapshot {step.snapshot_id} removed or changed rows, so its files are not only"
                f" what was added.\nHint: since={step.snapshot_id}, or the whole table."
            )
    if between:
        added = opened.incremental_append_scan(
            from_snapshot_id_exclusive=table.since, to_snapshot_id_inclusive=snapshot.snapshot_id
        )
        yield from added.plan_files()


def _live(table: Table, opened: Any, task: Any, columns: Any, schema: pa.Schema) -> LiveFile:
    file = task.file
    if file.file_format.value != "PARQUET":
        raise UnreadableError(f"{table!r} has files of {file.file_format.value}.\n{USE_SPARK}")
    deleted: list[int] = []
    for removal in task.delete_files:
        deleted += _positions(table, opened.io, removal, file.file_path)
    constants = {}
    for place, part in enumerate(opened.specs()[file.spec_id].fields):
        name = columns.find_column_name(part.source_id)
        if str(part.transform) == "identity" and name in schema.names:
            constants[name] = pa.scalar(file.partition[place], schema.field(name).type)
    local = re.sub(r"^file:(//)?(?=/)", "", file.file_path)
    return LiveFile(local, constants, deleted)


def _positions(table: Table, io: Any, removal: Any, file: str) -> list[int]:
    if removal.content.name != "POSITION_DELETES":
        raise UnreadableError(f"{table!r} has rows that are deleted by their values.\n{USE_SPARK}")
    with io.new_input(removal.file_path).open() as opened:
        if removal.file_format.value == "PARQUET":
            rows = pq.read_table(opened, columns=["file_path", "pos"])
            positions: list[int] = rows.filter(pc.equal(rows["file_path"], file))["pos"].to_pylist()
            return positions
        puffin = library("pyiceberg.table.puffin", table, extra="iceberg").PuffinFile(opened.read())
    vectors = library("pyiceberg.table.deletion_vector", table, extra="iceberg")
    found = vectors.deletion_vectors_from_puffin_file(puffin)
    return [p for v in found if v.referenced_data_file == file for p in v.to_vector().to_pylist()]
