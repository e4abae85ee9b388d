"""Versions of a Delta table, by the package deltalake."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from kindler.data.file_view import Storage
from kindler.data.paths import is_remote, local_path
from kindler.data.tables import FIELD_ID, USE_SPARK, LiveFile, Table, TableFiles, UnreadableError, library
from kindler.errors import ConfigError

# These do not change which rows the files hold, or the code below accounts for it.
_READ = {
    *("appendOnly", "domainMetadata", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"),
    *("columnMapping", "deletionVectors", "typeWidening", "typeWidening-preview"),
}


def files(table: Table) -> TableFiles:
    uri = table.uri()
    opened = library("deltalake", table, extra="delta").DeltaTable(
        uri, version=table.version, storage_options=table.options or None
    )
    root = _Root(uri, dict(table.options)) if is_remote(uri) else None
    if table.as_of is not None:
        opened.load_as_version(table.as_of)
        system, log = _log(opened, opened.version(), root)
        written = system.get_file_info(log).mtime
        if written is not None and written > table.as_of:  # deltalake takes the first version then
            raise ConfigError(f"{table!r}: the first version that is kept is from {written}.")
    table.chosen = {"format": "delta", "uri": uri, "version": opened.version()}
    unknown = set(opened.protocol().reader_features or ()) - _READ
    if unknown:
        raise UnreadableError(
            f"{table!r} is a Delta table with {', '.join(sorted(unknown))}, whose files cannot be read"
            f" directly.\n{USE_SPARK}"
        )
    columns = json.loads(opened.schema().to_json())["fields"]
    mapping = opened.metadata().configuration.get("delta.columnMapping.mode", "none")
    schema = pa.schema(opened.schema().to_arrow())
    stored = {} if mapping == "none" else {_physical(c): c["name"] for c in columns}
    if table.since is None:
        live = list(_live(opened, stored, root))
    else:
        table.chosen["since"] = table.since
        live = list(_added(table, opened, schema, stored, root))
    if mapping == "id":
        ids = [str(c["metadata"]["delta.columnMapping.id"]).encode() for c in columns]
        schema = pa.schema([f.with_metadata({FIELD_ID: i}) for f, i in zip(schema, ids, strict=True)])
    names = {name: [physical] for physical, name in stored.items()}
    return TableFiles(schema, live, names, storage=root)


@dataclass(frozen=True, slots=True)
class _Root(Storage):
    """The folder of a table in an object store, with the user's options."""

    uri: str
    options: dict[str, str] = field(repr=False)

    def open(self, file: str) -> Any:
        return self.system().open_input_file(file.removeprefix(posixpath.join(self.uri, "")))

    def system(self) -> fs.FileSystem:
        from deltalake.fs import DeltaStorageHandler

        return fs.PyFileSystem(DeltaStorageHandler(self.uri, self.options))


def _physical(column: Mapping[str, Any]) -> str:
    name: str = column["metadata"]["delta.columnMapping.physicalName"]
    return name


def _live(opened: Any, logical: Mapping[str, str], root: _Root | None) -> Iterator[LiveFile]:
    actions = pa.table(opened.get_add_actions(flatten=False))
    split = "partition" in actions.schema.names
    partitions = actions.column("partition").combine_chunks().flatten() if split else []
    names = actions.schema.field("partition").type.names if split else []
    deleted = _deleted(opened, root)
    for row, path in enumerate(actions.column("path").to_pylist()):
        values = {logical.get(n, n): column[row] for n, column in zip(names, partitions, strict=True)}
        place = _place(opened, unquote(path), root)
        yield LiveFile(place, values, deleted.pop(place, ()))
    if deleted:
        raise UnreadableError(
            f"{next(iter(deleted))!r} has deleted rows, but is not among the files.\n{USE_SPARK}"
        )


def _deleted(opened: Any, root: _Root | None) -> dict[str, Any]:
    """Positions of deleted rows, by file."""
    if "deletionVectors" not in (opened.protocol().reader_features or ()):
        return {}
    found = {}
    for batch in pa.RecordBatchReader.from_stream(opened.deletion_vectors()):
        for file, kept in zip(batch.column(0).to_pylist(), batch.column(1), strict=True):
            flags = kept.values.to_numpy(zero_copy_only=False)
            found[_place(opened, unquote(file), root)] = (~flags).nonzero()[0]
    return found


def _place(opened: Any, path: str, root: _Root | None) -> str:
    """How the storage calls a file that the log names, relative to the table or as a whole URI."""
    if root is None:
        return (
            path.removeprefix("file://")
            if "://" in path
            else posixpath.join(local_path(opened.table_uri), path)
        )
    place = path.removeprefix(unquote(opened.table_uri))
    if "://" in place:
        raise UnreadableError(f"{place!r} is not in the folder of its table, {root.uri!r}.\n{USE_SPARK}")
    return posixpath.join(root.uri, place)


def _added(
    table: Table, opened: Any, schema: pa.Schema, logical: Mapping[str, str], root: _Root | None
) -> Iterator[LiveFile]:
    """Files that commits after `since` added. A commit that only rewrote files changed no rows."""
    since, last = table.since, opened.version()
    if since is None or not 0 <= since <= last:
        raise ConfigError(
            f"{table!r}: since={since} must be a version from 0 to {last}, the one that is read."
        )
    for version in range(since + 1, last + 1):
        for action in _changes(table, opened, version, root):
            values = {logical.get(name, name): value for name, value in action["partitionValues"].items()}
            constants = {name: _typed(value, schema.field(name).type) for name, value in values.items()}
            yield LiveFile(_place(opened, unquote(action["path"]), root), constants)


def _log(opened: Any, version: int, root: _Root | None) -> tuple[fs.FileSystem, str]:
    name = f"_delta_log/{version:020}.json"
    if root is not None:
        return root.system(), name
    return fs.LocalFileSystem(), posixpath.join(local_path(opened.table_uri), name)


def _changes(table: Table, opened: Any, version: int, root: _Root | None) -> list[dict[str, Any]]:
    """The additions of one commit; refuses one that removed rows."""
    system, path = _log(opened, version, root)
    try:
        with system.open_input_file(path) as log:
            actions = [json.loads(line) for line in log.read().splitlines() if line.strip()]
    except FileNotFoundError:
        raise ConfigError(
            f"{table!r}: the log of version {version} is no longer kept.\nHint: since=... a later version."
        ) from None
    changed = [
        (kind, entry)
        for action in actions
        for kind, entry in action.items()
        if kind in ("add", "remove") and entry.get("dataChange", True)
    ]
    if any(kind == "remove" or entry.get("deletionVector") for kind, entry in changed):
        raise ConfigError(
            f"{table!r}: version {version} removed or changed rows, so its files are not only what was"
            f" added.\nHint: since={version}, or the whole table."
        )
    return [entry for _, entry in changed]


def _typed(value: str | None, kind: pa.DataType) -> pa.Scalar:
    """A partition value, which the log keeps as text."""
    text = pa.scalar(value or None, pa.string())  # an empty text is null
    if pa.types.is_timestamp(kind) and kind.tz is not None and value and not value.endswith("Z"):
        return text.cast(pa.timestamp(kind.unit)).cast(kind)
    return text.cast(kind)
