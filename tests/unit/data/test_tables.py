"""Delta and Iceberg tables: the rows that a version has, as the formats' own libraries read them."""

from __future__ import annotations

import copy
import json
import os
import pickle
import threading
from datetime import date, datetime, timezone
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kindler import Table
from kindler.data import parquet, tables
from kindler.errors import ConfigError, DataError, MissingExtraError
from tests.unit.data.lake import (
    additions,
    azure_server,
    commit,
    rows,
    same,
    with_deletion_vector,
    with_position_deletes,
)


def table(first: int, last: int) -> pa.Table:
    return pa.table({"x": np.arange(first, last, dtype="float32"), "y": np.arange(first, last)})


@pytest.fixture
def delta() -> Any:
    return pytest.importorskip("deltalake", reason="deltalake is not installed")


@pytest.fixture
def iceberg(tmp_path: Path) -> Any:
    """An empty table of these columns, in a catalog."""
    catalogs = pytest.importorskip("pyiceberg.catalog.sql", reason="pyiceberg is not installed")
    catalog = catalogs.SqlCatalog("c", uri=f"sqlite:///{tmp_path}/c.db", warehouse=f"file://{tmp_path}/w")
    catalog.create_namespace("n")
    yield catalog.create_table("n.t", schema=table(0, 1).schema)
    catalog.close()


def of_catalog(folder: Path, **choice: Any) -> Table:
    options = {"type": "sql", "uri": f"sqlite:///{folder}/c.db", "warehouse": f"file://{folder}/w"}
    return Table("c.n.t", options=options, **choice)


def own_rows(delta: Any, place: Path, version: int | None = None) -> list[dict[str, Any]]:
    read = delta.DeltaTable(str(place), version=version).scan()
    found: list[dict[str, Any]] = pa.RecordBatchReader.from_stream(read).read_all().to_pylist()
    return found


def test_a_delta_table_has_the_rows_of_its_newest_version_or_of_the_one_that_is_named(
    delta: Any, tmp_path: Path
) -> None:
    place = tmp_path / "of table"
    delta.write_deltalake(str(place), table(0, 5))
    delta.write_deltalake(str(place), table(5, 8), mode="append")
    assert sorted(rows(str(place), "y")) == list(range(8))

    delta.write_deltalake(str(place), table(20, 24), mode="overwrite")
    assert rows(place, "y") == [20, 21, 22, 23]  # the files of the others are still there
    assert len(list(place.glob("*.parquet"))) == 3

    delta.DeltaTable(str(place)).delete("y >= 22")  # without deletion vectors: files are written anew
    assert rows(place, "y") == [20, 21]
    assert Table(place).describe() == {"format": "delta", "uri": str(place), "version": 3}
    again = Table.of(Table(place, version=1).describe())
    assert sorted(rows(again, "y")) == list(range(8))
    for version in range(4):
        assert same(rows(Table(place, version=version)), own_rows(delta, place, version))


def test_a_table_keeps_the_version_of_its_first_use(delta: Any, tmp_path: Path) -> None:
    delta.write_deltalake(str(tmp_path), table(0, 5))
    kept = Table(tmp_path)
    assert kept.describe()["version"] == 0
    delta.write_deltalake(str(tmp_path), table(5, 8), mode="append")
    assert rows(kept, "y") == list(range(5))


def test_as_of_is_the_version_that_a_delta_table_had_then(delta: Any, tmp_path: Path) -> None:
    delta.write_deltalake(str(tmp_path), table(0, 5))
    delta.write_deltalake(str(tmp_path), table(5, 8), mode="append")
    for version, day in enumerate((1, 3)):
        then = datetime(2026, 1, day, tzinfo=timezone.utc).timestamp()
        os.utime(tmp_path / "_delta_log" / f"{version:020}.json", (then, then))
    assert Table(tmp_path, as_of="2026-01-02T00:00:00Z").describe()["version"] == 0
    assert Table(tmp_path, as_of=datetime(2026, 1, 4, tzinfo=timezone.utc)).describe()["version"] == 1
    with pytest.raises(ConfigError, match="the first version that is kept is from 2026-01-01"):
        Table(tmp_path, as_of="2025-12-31T00:00:00Z").describe()
    with pytest.raises(ConfigError, match="has no time zone"):
        Table(tmp_path, as_of="2026-01-02")


def test_partition_columns_of_every_type_are_columns_of_each_row(delta: Any, tmp_path: Path) -> None:
    keys = pa.table(
        {
            "day": pa.array([date(2026, 1, 1), None, date(2026, 1, 2), None], pa.date32()),
            "text": ["a b", "ü/=%20", "a b", None],
            "flag": [True, False, None, True],
            "size": pa.array([1, None, 3, 4], pa.int16()),
            "price": pa.array([Decimal("1.50"), None, Decimal("2.00"), Decimal("0.25")], pa.decimal128(8, 2)),
            "time": pa.array([datetime(2026, 1, 1, 2, 3, 4, 5)] * 3 + [None], pa.timestamp("us", "UTC")),
        }
    )
    whole = keys.append_column("y", pa.array([0, 1, 2, 3]))
    for part in (whole.slice(0, 2), whole.slice(2)):
        delta.write_deltalake(str(tmp_path), part, mode="append", partition_by=keys.column_names)
    assert same(rows(tmp_path, *whole.column_names), whole.to_pylist())
    assert same(rows(tmp_path), own_rows(delta, tmp_path))
    added = rows(Table(tmp_path, since=0), *whole.column_names)
    assert same(added, whole.slice(2).to_pylist())
    assert sorted(rows(tmp_path, "flag"), key=str) == [False, None, True, True]


def test_rows_that_a_deletion_vector_names_are_not_read(delta: Any, tmp_path: Path) -> None:
    data = table(0, 10).append_column("k", pa.array(["a b"] * 6 + ["c"] * 4))
    delta.write_deltalake(str(tmp_path), data, partition_by=["k"])
    log = tmp_path / "_delta_log"
    (add,) = (one for one in additions(log, 0) if one["partitionValues"]["k"] == "a b")
    commit(log, 1, with_deletion_vector(add, [0, 3, 5]))
    files = tables.inspect(tmp_path)
    assert rows(tmp_path, "y") == [1, 2, 4, 6, 7, 8, 9]
    assert same(rows(tmp_path), own_rows(delta, tmp_path))
    one_by_one = [parquet.scan(files, ["y"], row, row + 1) for row in range(files.rows)]
    assert [b.column("y").to_pylist() for scan in one_by_one for b in scan] == [
        [1],
        [2],
        [4],
        [6],
        [7],
        [8],
        [9],
    ]
    assert [files.locate(row).split(" of ")[0] for row in (0, 2, 3)] == ["0 (row 1", "2 (row 4", "3 (row 0"]
    assert rows(Table(tmp_path, version=0), "y") == list(range(10))


def test_columns_that_were_added_later_are_null_in_older_rows_of_a_delta_table(
    delta: Any, tmp_path: Path
) -> None:
    delta.write_deltalake(str(tmp_path), table(0, 2))
    wider = table(2, 4).append_column("z", pa.array([0.5, 1.5]))
    delta.write_deltalake(str(tmp_path), wider, mode="append", schema_mode="merge")
    assert sorted(rows(tmp_path, "y", "z"), key=str) == [
        {"y": 0, "z": None}, {"y": 1, "z": None}, {"y": 2, "z": 0.5}, {"y": 3, "z": 1.5},
    ]  # fmt: skip
    assert same(rows(tmp_path), own_rows(delta, tmp_path))
    assert list(rows(Table(tmp_path, version=0))[0]) == ["x", "y"]


@pytest.mark.parametrize("mode", ["name", "id"])
def test_renamed_columns_of_a_delta_table_have_their_new_names(delta: Any, tmp_path: Path, mode: str) -> None:
    kinds = {"col-1": pa.float32(), "col-2": pa.int64()}
    numbered = pa.schema(
        [pa.field(name, kind, metadata={"PARQUET:field_id": name[-1]}) for name, kind in kinds.items()]
    )
    delta.write_deltalake(str(tmp_path), table(0, 3))
    log = tmp_path / "_delta_log"
    (add,) = additions(log, 0)
    pa.parquet.write_table(
        table(0, 3).rename_columns(["col-1", "col-2"]).cast(numbered), tmp_path / add["path"]
    )
    actions = [json.loads(line) for line in (log / f"{0:020}.json").read_text().splitlines()]
    for action in actions:
        if "protocol" in action:
            action["protocol"] = {"minReaderVersion": 2, "minWriterVersion": 5}
        if "metaData" in action:
            schema = json.loads(action["metaData"]["schemaString"])
            for number, (field, name) in enumerate(zip(schema["fields"], ("speed", "place"), strict=True), 1):
                field["name"] = name
                field["metadata"] = {
                    "delta.columnMapping.id": number,
                    "delta.columnMapping.physicalName": f"col-{number}",
                }
            action["metaData"]["schemaString"] = json.dumps(schema)
            action["metaData"]["configuration"] = {
                "delta.columnMapping.mode": mode, "delta.columnMapping.maxColumnId": "2",
            }  # fmt: skip
    commit(log, 0, actions)
    size = (tmp_path / add["path"]).stat().st_size
    text = (log / f"{0:020}.json").read_text().replace(f'"size": {add["size"]}', f'"size": {size}')
    (log / f"{0:020}.json").write_text(text)
    assert rows(tmp_path) == [{"speed": float(i), "place": i} for i in range(3)]


def test_since_reads_what_commits_added_and_refuses_those_that_removed(delta: Any, tmp_path: Path) -> None:
    for first in (0, 3, 6):
        delta.write_deltalake(str(tmp_path), table(first, first + 3), mode="append")
    opened = delta.DeltaTable(str(tmp_path))
    opened.optimize.compact()  # version 3: all rows in one file, no row is new
    added = Table(tmp_path, since=0)
    assert sorted(rows(added, "y")) == [3, 4, 5, 6, 7, 8]
    assert added.describe() == {"format": "delta", "uri": str(tmp_path), "version": 3, "since": 0}
    assert rows(Table(tmp_path, since=0, version=1), "y") == [3, 4, 5]
    with pytest.raises(DataError, match="has no rows that were added since"):
        rows(Table(tmp_path, since=3))
    with pytest.raises(ConfigError, match="must be a version from 0 to 3"):
        rows(Table(tmp_path, since=4))
    opened.delete("y = 4")
    with pytest.raises(ConfigError, match=r"(?s)version 4 removed or changed rows.*since=4"):
        rows(Table(tmp_path, since=0))


def test_a_delta_table_that_lacks_a_file_or_has_a_broken_log_is_refused(delta: Any, tmp_path: Path) -> None:
    place = tmp_path / "table"
    delta.write_deltalake(str(place), table(0, 5))
    (file,) = place.glob("*.parquet")
    file.unlink()
    with pytest.raises(DataError, match=rf"lacks its file '{file.name}'"):
        tables.inspect(place)

    (log,) = (place / "_delta_log").glob("*.json")
    log.write_text("{")
    with pytest.raises(ConfigError, match=r"(?s)cannot be read.*pass the DataFrame"):
        tables.inspect(place)


def test_a_delta_table_with_a_feature_of_the_future_is_refused(
    delta: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta.write_deltalake(str(tmp_path), table(0, 5))

    class Protocol:
        reader_features = ("catalogManaged", "timestampNtz")

    monkeypatch.setattr(delta.DeltaTable, "protocol", lambda table: Protocol())
    with pytest.raises(ConfigError, match=r"(?s)is a Delta table with catalogManaged,.*pass the DataFrame"):
        tables.inspect(tmp_path)


def test_a_table_in_a_folder_below_is_not_read_as_plain_files(delta: Any, tmp_path: Path) -> None:
    delta.write_deltalake(str(tmp_path / "below"), table(0, 5))
    with pytest.raises(ConfigError, match=r"(?s)contains a table of Delta.*kindler\.Table\("):
        tables.inspect(tmp_path)


def test_tables_and_files_can_be_read_together(delta: Any, tmp_path: Path) -> None:
    delta.write_deltalake(str(tmp_path / "table"), table(0, 3))
    pa.parquet.write_table(table(3, 5), tmp_path / "more.parquet")
    both = [Table(tmp_path / "table"), tmp_path / "more.parquet"]
    assert rows(both, "y") == [0, 1, 2, 3, 4]
    assert rows(list(map(str, reversed([tmp_path / "table", both[1]]))), "y") == [3, 4, 0, 1, 2]


@pytest.mark.parametrize(
    ("mark", "missing", "extra"),
    [
        ("_delta_log/0.json", "deltalake", "delta"),
        ("metadata/v1.metadata.json", "pyiceberg", "iceberg"),
    ],
)
def test_without_the_library_that_reads_the_log_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, missing: str, extra: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, missing, None)
    (tmp_path / mark).parent.mkdir()
    (tmp_path / mark).touch()
    with pytest.raises(MissingExtraError, match=rf"kindler\[{extra}\]"):
        tables.inspect(tmp_path)


def test_an_iceberg_table_by_path_has_the_rows_of_the_version_that_its_folder_names(
    iceberg: Any, tmp_path: Path
) -> None:
    iceberg.append(table(0, 5))
    iceberg.append(table(5, 8))
    place = Path(iceberg.location().removeprefix("file://"))
    with pytest.raises(ConfigError, match=r"(?s)only its catalog knows.*pass the DataFrame"):
        tables.inspect(place)
    assert sorted(rows(Table(iceberg.metadata_location), "y")) == list(range(8))

    def name_newest() -> None:
        newest = Path(iceberg.metadata_location.removeprefix("file://"))
        newest.with_name("v1.metadata.json").write_bytes(newest.read_bytes())
        newest.with_name("version-hint.text").write_text("1")

    name_newest()
    assert sorted(rows(place, "y")) == list(range(8))
    iceberg.overwrite(table(20, 23))
    assert sorted(rows(place, "y")) == list(range(8))  # as long as the hint has not moved on
    name_newest()
    assert rows(place, "y") == [20, 21, 22]


def test_snapshots_of_an_iceberg_table_have_their_own_rows_columns_and_partitions(
    iceberg: Any, tmp_path: Path
) -> None:
    from pyiceberg.types import DoubleType, IntegerType, StringType

    iceberg.append(table(0, 3))
    with iceberg.update_schema() as change:
        change.rename_column("x", "speed").add_column("z", IntegerType()).add_column("k", StringType())
    with iceberg.update_schema() as change:
        change.update_column("speed", DoubleType())
    with iceberg.update_spec() as change:
        change.add_identity("k")
    later = pa.table({"speed": [3.5, 4.5], "y": [3, 4], "z": [1, None], "k": ["a b", "ü/="]})
    iceberg.append(later.cast(iceberg.schema().as_arrow()))
    iceberg.delete("y = 1")
    ids = [snapshot.snapshot_id for snapshot in iceberg.snapshots()]
    assert of_catalog(tmp_path).describe() == {
        "format": "iceberg", "name": "c.n.t", "uri": iceberg.location(), "snapshot": ids[-1],
    }  # fmt: skip
    for number in ids:
        own = iceberg.scan(snapshot_id=number).to_arrow().to_pylist()
        assert same(rows(of_catalog(tmp_path, snapshot=number)), own)
    iceberg.manage_snapshots().create_tag(ids[0], "first").commit()
    assert rows(of_catalog(tmp_path, snapshot="first"), "y") == [0, 1, 2]
    then = datetime.fromtimestamp(iceberg.snapshots()[0].timestamp_ms / 1000, timezone.utc)
    assert of_catalog(tmp_path, as_of=then).describe()["snapshot"] == ids[0]
    with pytest.raises(ConfigError, match=r"no such snapshot; it has \['first', 'main', \d+"):
        rows(of_catalog(tmp_path, snapshot="second"))


def test_a_delta_table_in_azure_is_read_at_each_version(delta: Any) -> None:
    name = "abfss://lake@devstoreaccount1.dfs.core.windows.net/table"
    with azure_server("lake") as options:
        delta.write_deltalake(name, table(0, 5), storage_options=options)
        delta.DeltaTable(name, storage_options=options).delete("y = 2")
        assert rows(Table(name, options=options, version=0), "y") == [0, 1, 2, 3, 4]
        kept = Table(name, options=options, format="delta")
        assert rows(kept, "y") == [0, 1, 3, 4]
    assert kept.describe() == {"format": "delta", "uri": name, "version": 1}


class OfRest(BaseHTTPRequestHandler):
    """What reading one table needs of a REST catalog."""

    table: Any

    def do_GET(self) -> None:
        if self.headers["Authorization"] != "Bearer tiger":
            return self.answer(
                401, {"error": {"message": "who?", "type": "NotAuthorizedException", "code": 401}}
            )
        if self.path.startswith("/v1/config"):
            return self.answer(200, {"defaults": {}, "overrides": {}})
        if self.path != "/v1/namespaces/n/tables/t":
            return self.answer(404, {"error": {"message": "no", "type": "NoSuchTableException", "code": 404}})
        place = self.table.metadata_location
        metadata = json.loads(Path(place.removeprefix("file://")).read_text())
        return self.answer(200, {"metadata-location": place, "metadata": metadata, "config": {}})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_a_table_of_a_rest_catalog_is_read_with_the_token_of_the_options(iceberg: Any) -> None:
    iceberg.append(table(0, 5))
    iceberg.delete("y = 2")
    OfRest.table = iceberg
    with ThreadingHTTPServer(("127.0.0.1", 0), OfRest) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        catalog = {"type": "rest", "uri": f"http://127.0.0.1:{server.server_port}"}
        kept = Table("c.n.t", options={**catalog, "token": "tiger"})
        first = Table("c.n.t", snapshot=iceberg.snapshots()[0].snapshot_id, options=kept.options)
        assert rows(kept, "y") == [0, 1, 3, 4]
        assert rows(first, "y") == [0, 1, 2, 3, 4]
        with pytest.raises(ConfigError, match="who") as refused:
            rows(Table("c.n.t", options={**catalog, "token": "lion"}), "y")
        with pytest.raises(ConfigError, match="cannot be read"):
            rows(Table("c.n.other", options=kept.options), "y")
        server.shutdown()
    assert "tiger" not in repr(kept.describe())
    assert "lion" not in str(refused.value)


def test_a_column_that_was_dropped_and_made_again_has_no_old_values(iceberg: Any, tmp_path: Path) -> None:
    from pyiceberg.types import LongType

    iceberg.append(table(0, 2))
    with iceberg.update_schema() as change:
        change.delete_column("y")
    with iceberg.update_schema() as change:
        change.add_column("y", LongType())
    assert rows(of_catalog(tmp_path), "y") == [None, None]


def test_rows_that_position_deletes_name_are_not_read(iceberg: Any, tmp_path: Path) -> None:
    iceberg.append(table(0, 6))
    iceberg.append(table(6, 9))
    first = next(task.file for task in iceberg.scan().plan_files() if task.file.record_count == 6)
    with_position_deletes(iceberg, first.file_path, [5, 0])
    with_position_deletes(iceberg, first.file_path, [2, 0])
    assert sorted(rows(of_catalog(tmp_path), "y")) == [1, 3, 4, 6, 7, 8]
    assert same(rows(of_catalog(tmp_path)), iceberg.scan().to_arrow().to_pylist())


def test_since_a_snapshot_reads_what_was_appended(iceberg: Any, tmp_path: Path) -> None:
    for first in (0, 3, 6):
        iceberg.append(table(first, first + 3))
    ids = [snapshot.snapshot_id for snapshot in iceberg.snapshots()]
    assert sorted(rows(of_catalog(tmp_path, since=ids[0]), "y")) == [3, 4, 5, 6, 7, 8]
    assert rows(of_catalog(tmp_path, since=ids[0], snapshot=ids[1]), "y") == [3, 4, 5]
    with pytest.raises(ConfigError, match="snapshot 7 is not among those before"):
        rows(of_catalog(tmp_path, since=7))
    iceberg.delete("y = 4")
    with pytest.raises(ConfigError, match=r"removed or changed rows.*\n.*since=\d+"):
        rows(of_catalog(tmp_path, since=ids[0]))


def test_credentials_are_neither_shown_nor_pickled(tmp_path: Path) -> None:
    secret = Table("s3://bucket/table", format="delta", options={"AWS_SECRET_ACCESS_KEY": "tiger"})
    assert repr(secret) == "Table('s3://bucket/table', format='delta')"
    assert b"tiger" not in pickle.dumps(secret)
    assert pickle.loads(pickle.dumps(secret)).name == secret.name
    assert copy.deepcopy(secret).options == secret.options
    with pytest.raises(ConfigError, match=r"a URI with options") as refused:
        Table("s3://name:tiger@bucket/table")
    assert "tiger" not in str(refused.value)
    options = {"type": "sql", "uri": f"sqlite:///{tmp_path}/tiger/c.db"}
    with pytest.raises(ConfigError, match=r"cannot be read") as failed:
        Table("c.n.t", options=options).describe()
    assert "tiger" not in str(failed.value)
    assert failed.value.__cause__ is None


@pytest.mark.parametrize(
    ("choice", "rule"),
    [
        ({"version": 1, "as_of": "2026-01-01T00:00:00Z"}, "version and as_of choose a version each"),
        ({"format": "hudi"}, "must be format='delta' or format='iceberg'"),
        ({"format": "delta", "snapshot": 1}, r"chosen with version=\.\.\., not snapshot"),
        ({"as_of": "yesterday"}, "'yesterday' is not a time"),
    ],
)
def test_choices_that_contradict_each_other_are_refused(choice: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        Table("somewhere/table", **choice)
