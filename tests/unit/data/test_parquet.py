"""Files are found as Spark would, and any range of rows is read exactly."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kindler.data import parquet, paths
from kindler.errors import ConfigError, DataError


def write(path: Path, start: int, stop: int, *, group: int = 4, **extra: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = np.arange(start, stop)
    x = pa.array([[float(i), i + 0.5] for i in ids], pa.list_(pa.float32()))
    pq.write_table(pa.table({"id": ids, "x": x, **extra}), path, row_group_size=group)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "a b%20c"
    write(root / "part-0.parquet", 0, 10)
    write(root / "part-1.parquet", 10, 10)
    write(root / "sub" / "part-2.parquet", 10, 17)
    (root / "_SUCCESS").touch()
    (root / ".part-0.parquet.crc").touch()
    (root / "notes.txt").write_text("not data")
    write(root / "_temporary" / "part-9.parquet", 90, 99)
    return root


def ids(files: parquet.ParquetFiles, start: int, stop: int) -> list[int]:
    return [i for batch in parquet.scan(files, ["id"], start, stop) for i in batch.column("id").to_pylist()]


def test_a_folder_is_searched_and_hidden_names_are_skipped(folder: Path) -> None:
    found = parquet.inspect(folder)

    assert [Path(file).name for file in found.files] == ["part-0.parquet", "part-1.parquet", "part-2.parquet"]
    assert found.row_groups == ((4, 4, 2), (), (4, 3)) or found.row_groups == ((4, 4, 2), (0,), (4, 3))
    assert found.rows == 17


def test_paths_uris_globs_and_lists_mean_the_same_files(folder: Path) -> None:
    expected = parquet.inspect(folder).files
    uri = "file:" + str(folder).replace("%", "%25").replace(" ", "%20")

    assert parquet.inspect(str(folder)).files == expected
    assert parquet.inspect(uri).files == expected
    assert parquet.inspect(uri.replace("file:", "file://")).files == expected
    assert parquet.inspect([f"{folder}/*.parquet", folder / "sub"]).files == expected
    assert parquet.inspect(f"{folder}/**/part-2*").files == expected[-1:]


def test_relative_paths_become_absolute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)

    assert parquet.inspect(folder.name).files == parquet.inspect(folder).files


def test_a_name_with_magic_characters_is_taken_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "a[1]?#.parquet", 0, 3)

    assert parquet.inspect(path).files == (str(path),)
    assert parquet.inspect(f"file://{path}").files == (str(path),)


def test_nothing_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing' does not exist"):
        parquet.inspect(tmp_path / "missing")
    with pytest.raises(ConfigError, match="no Parquet file in"):
        parquet.inspect(tmp_path)
    with pytest.raises(ConfigError, match="no Parquet file in"):
        parquet.inspect(f"{tmp_path}/*.parquet")
    with pytest.raises(ConfigError, match=r"no Parquet file in \[\]"):
        parquet.inspect([])
    with pytest.raises(ConfigError, match="Hint: a local path"):
        parquet.inspect("nosuch://host/path")


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 0)
    with pytest.raises(DataError, match="have no rows"):
        parquet.inspect(tmp_path)


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("hello, this is text")
    with pytest.raises(DataError, match=r"a\.parquet is not a Parquet file"):
        parquet.inspect(tmp_path)


@pytest.mark.parametrize(
    ("mark", "problem"),
    [
        ("below/_delta_log/0.json", "contains a table of Delta"),
        (".hoodie/hoodie.properties", "is a table of Hudi"),
        ("below/metadata/v1.metadata.json", "contains a table of Iceberg"),
    ],
)
def test_tables_of_other_formats_are_not_read_as_plain_files(tmp_path: Path, mark: str, problem: str) -> None:
    write(tmp_path / "a.parquet", 0, 3)
    (tmp_path / mark).parent.mkdir(parents=True)
    (tmp_path / mark).touch()
    with pytest.raises(ConfigError, match=f"{problem}(?s:.*)pass the DataFrame"):
        parquet.inspect(tmp_path)


def test_the_uri_of_a_found_file_keeps_host_and_options() -> None:
    made = paths.child_uri

    assert (
        made("s3://bucket/a/?region=eu", "bucket/a", "bucket/a/x.parquet")
        == "s3://bucket/a/x.parquet?region=eu"
    )
    assert made("hdfs://host:9000/a", "/a", "/a/x.parquet") == "hdfs://host:9000/a/x.parquet"
    assert made("hdfs://host:9000/a.parquet", "/a.parquet", "/a.parquet") == "hdfs://host:9000/a.parquet"


def test_schema_wants_the_columns_in_every_file(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 3, y=[1, 2, 3])
    write(tmp_path / "b.parquet", 3, 6)
    files = parquet.inspect(tmp_path)

    assert parquet.schema(files, ["id", "x"]).names == ["id", "x", "y"]
    with pytest.raises(
        DataError, match=r"column 'y': is not in .*b\.parquet, which has the columns \['id', 'x'\]"
    ):
        parquet.schema(files, ["id", "y"])
    with pytest.raises(DataError, match=r"column 'y': is not in .*b\.parquet"):
        list(parquet.scan(files, ["y"], 0, 6))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(st.integers(0, 17), st.integers(0, 17))
def test_any_range_of_rows_is_read_in_file_order(folder: Path, start: int, stop: int) -> None:
    assert ids(parquet.inspect(folder), start, stop) == list(range(start, stop))


@given(st.integers(0, 1000), st.integers(1, 12))
def test_shares_are_balanced_and_cover_everything_once(rows: int, size: int) -> None:
    shares = [parquet.share(rows, size, rank) for rank in range(size)]

    assert [row for start, stop in shares for row in range(start, stop)] == list(range(rows))
    assert max(b - a for a, b in shares) - min(b - a for a, b in shares) <= 1


def test_only_the_columns_asked_for_come_in_the_order_asked_for(folder: Path) -> None:
    batch = next(parquet.scan(parquet.inspect(folder), ["x", "id"], 3, 17))

    assert batch.schema.names == ["x", "id"]
    assert batch.column("x")[0].as_py() == [3.0, 3.5]


def test_batches_stay_small_for_wide_rows(tmp_path: Path) -> None:
    wide = pa.array(list(np.random.default_rng(0).random((2000, 1000), np.float32)))
    pq.write_table(pa.table({"x": wide}), tmp_path / "a.parquet")
    batches = list(parquet.scan(parquet.inspect(tmp_path), ["x"], 0, 2000))

    assert sum(len(batch) for batch in batches) == 2000
    assert max(batch.nbytes for batch in batches) < 4 << 20


def test_equal_schemas_travel_once(tmp_path: Path) -> None:
    for i in range(20):
        write(tmp_path / f"{i:02d}.parquet", i, i + 1)
    files = parquet.inspect(tmp_path)
    copy = pickle.loads(pickle.dumps(files))

    assert copy == files
    assert len({id(schema) for schema in copy.schemas}) == 1


def test_a_row_is_located_in_its_file(folder: Path) -> None:
    assert parquet.inspect(folder).locate(12).startswith("12 (row 2 of /")
    assert parquet.inspect(folder).locate(12).endswith("part-2.parquet)")


def test_row_reader_reads_ranges_across_row_groups(folder: Path) -> None:
    with parquet.RowReader(folder / "part-0.parquet", ["id"]) as reader:
        assert reader.rows == 10
        for start, stop in [(0, 3), (3, 9), (9, 10), (2, 2), (0, 10)]:
            found = reader.read(start, stop)
            assert found.schema.names == ["id"]
            assert found.column("id").to_pylist() == list(range(start, stop))
        with pytest.raises(ValueError, match=r"read\(5, 11\) of a file of 10 rows"):
            reader.read(5, 11)


def test_no_file_stays_open(folder: Path) -> None:
    def open_files() -> list[str]:
        targets = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return [target for target in targets if target.startswith(str(folder))]

    files = parquet.inspect(folder)
    list(parquet.scan(files, ["id"], 0, 17))
    half = parquet.scan(files, ["id"], 0, 17)
    next(half)
    half.close()
    with parquet.RowReader(folder / "part-0.parquet", ["id"]) as reader:
        reader.read(0, 3)

    assert open_files() == []


def test_row_reader_wants_known_columns(folder: Path) -> None:
    with pytest.raises(DataError, match="column 'nope': is not in"):
        parquet.RowReader(folder / "part-0.parquet", ["nope"])


@pytest.mark.parametrize("now", [{"x": [1, 2]}, {"x": [1.0, 2.0, 3.0]}], ids=["fewer rows", "another type"])
def test_a_file_that_changes_after_it_was_counted_is_an_error(tmp_path: Path, now: dict[str, Any]) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [1, 2, 3]}), path)
    files = parquet.inspect(path)
    pq.write_table(pa.table(now), path)

    with pytest.raises(DataError, match=r"a\.parquet has changed since it was counted"):
        list(parquet.scan(files, ["x"], 0, files.rows))


def test_files_that_are_named_one_by_one_are_neither_searched_for_nor_joined(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a1.parquet")
    looked: list[str] = []
    named = [str(tmp_path / "a1.parquet")] * 2

    files = parquet.inspect_files(named, lambda file, opened: looked.append(file))

    assert (list(files.files), files.rows, looked) == (named, 2, named)
    with pytest.raises(OSError, match=r"a\[1\]\.parquet"):
        parquet.inspect_files([str(tmp_path / "a[1].parquet")], lambda file, opened: None)
