"""Data in every form becomes the same spool, each row at exactly one worker."""

from __future__ import annotations

import datetime
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kindler.data.arrays import is_local_data, kind
from kindler.data.column_options import ColumnOptions
from kindler.data.columns import Column, ColumnPlan
from kindler.data.parquet import inspect, scan
from kindler.data.row_order import RowAssignment
from kindler.data.sources import (
    ROW_BITS,
    DeliveredSource,
    FolderSource,
    Source,
    arrow_source,
    parquet_source,
)
from kindler.data.spool import Spool, SpoolWriter
from kindler.errors import ConfigError, DataError
from kindler.testing import thread_workers

X = np.arange(12, dtype=np.float32).reshape(6, 2)
Y = np.arange(6)


def opened(data: Any, scratch: Path, **options: Any) -> dict[str, np.ndarray[Any, Any]]:
    source = arrow_source(data, ColumnOptions(**options), scratch=scratch)
    return thread_workers.opened(source, 1, scratch)[0].arrays


def own(spool: Spool, name: str = "y") -> np.ndarray[Any, Any]:
    """A worker's own rows, in their order."""
    return spool.arrays[name] if spool.order is None else spool.arrays[name][spool.order]


def gathered(source: Source, size: int, scratch: Path, name: str = "y", **options: Any) -> list[Any]:
    """The rows of all workers, by their numbers."""
    spools = thread_workers.opened(pickle.loads(pickle.dumps(source)), size, scratch, **options)
    numbers = np.concatenate([spool.numbers for spool in spools if spool.numbers is not None])
    assert sorted(numbers.tolist()) == list(range(len(numbers)))
    return np.concatenate([own(spool, name) for spool in spools if spool.rows])[np.argsort(numbers)].tolist()


@pytest.mark.parametrize(
    "data",
    [
        {"x": X, "y": Y},
        (X, Y),
        (X.tolist(), Y.tolist()),
        {"x": X.astype(np.float64), "y": Y.astype(np.int8)},
        pa.table({"x": list(X), "y": Y}),
        pa.RecordBatch.from_pydict({"x": list(X), "y": Y}),
        pd.DataFrame({"x": list(X), "y": Y}),
        pd.DataFrame({"x": X.tolist(), "y": pd.array(Y, "Int64")}),
    ],
    ids=["dict", "tuple", "lists", "casts", "table", "batch", "frame", "frame of lists"],
)
def test_every_form_gives_the_same_arrays(data: Any, tmp_path: Path) -> None:
    found = opened(data, tmp_path)

    np.testing.assert_array_equal(found["x"], X)
    np.testing.assert_array_equal(found["y"], Y)
    assert (found["x"].dtype, found["y"].dtype) == (np.float32, np.int64)


def test_several_inputs_and_targets_are_numbered_or_named(tmp_path: Path) -> None:
    assert list(opened(((X, X), Y), tmp_path)) == ["x0", "x1", "y"]
    assert list(opened(([X, X], (Y, Y)), tmp_path)) == ["x0", "x1", "y0", "y1"]
    assert list(opened({"x": {"a": X, "b": Y}, "y": Y}, tmp_path)) == ["a", "b", "y"]
    assert list(opened({"x": (X,), "y": {"t": Y}}, tmp_path)) == ["x0", "t"]
    assert list(opened((pd.DataFrame({"a": Y, "b": Y}), pd.Series(Y)), tmp_path)) == ["a", "b", "y"]


def test_inputs_alone_are_enough_where_no_targets_are_needed(tmp_path: Path) -> None:
    assert list(opened(X, tmp_path, need_labels=False)) == ["x"]
    assert list(opened((X,), tmp_path, need_labels=False)) == ["x"]
    assert list(opened((X, Y), tmp_path, need_labels=False)) == ["x"]
    with pytest.raises(ConfigError, match=r"pass label_cols"):
        opened(X, tmp_path)


def test_columns_that_are_not_used_may_be_anything(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0], "s": ["u", "v"], "y": [0, 1]})

    assert list(opened(frame, tmp_path, feature_cols=["a"], label_cols="y")) == ["a", "y"]
    with pytest.raises(DataError, match="column 's': values of type"):
        opened(frame, tmp_path, feature_cols=["s"], label_cols="y")


def test_frames_of_images_dates_and_numbered_columns_work(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [np.eye(2), np.ones((2, 2))], 0: pd.to_datetime(["1970-01-01", "1970-01-02"])})
    found = opened(frame, tmp_path, feature_cols=["x", "0"], label_cols=[])

    np.testing.assert_array_equal(found["x"], [np.eye(2), np.ones((2, 2))])
    assert found["0"].tolist() == [0, 86_400_000_000]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([[1.0, 2.0], [3.0]], "row 1: has 1 values where the rows before it have 2"),
        (np.array([[1.0], [np.nan]]), "row 1: is NaN"),
        (["a", "b"], "cannot feed a model"),
        ([None, 1.0], "row 0: is null"),
        (pd.Series([1.0, None], dtype=object), "row 1: is null"),
        (pd.Series([np.eye(2), np.eye(3)]), r"row 1: has shape \(3, 3\) where the first row has \(2, 2\)"),
        ([1, "a"], "cannot feed a model|do not form one column"),
        ([datetime.time(1), datetime.time(2)], "cannot feed a model"),
    ],
)
def test_bad_values_name_column_and_row_and_leave_nothing_behind(
    x: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=f"column 'x'.*({message})"):
        opened({"x": x, "y": [0, 1]}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_columns_of_different_lengths_name_both(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="columns 'x' and 'y' have different lengths: 6 and 5"):
        opened((X, Y[:5]), tmp_path)


def test_no_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a dict of arrays has no rows"):
        opened({"x": X[:0], "y": Y[:0]}, tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (42, r"cannot use a builtins.int as data(?s:.*)a dict of arrays, a tuple \(x, y\)"),
        ({}, "cannot use an empty dict as data"),
        ((X, Y, Y), "cannot use a tuple of 3 as data"),
        ({"x": X, "y": 3}, "column 'y' is the single value 3"),
        ({"x": {"a": X}, "y": {"a": Y}}, r"\['a'\] name both inputs and targets"),
        (pd.DataFrame([[1, 2]], columns=["x", "x"]), "two columns are named 'x'"),
    ],
)
def test_what_is_no_data_is_answered_with_what_is(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(data, tmp_path)


def test_kinds_are_told_apart() -> None:
    table = pa.table({"x": [1]})
    frame = pd.DataFrame({"x": [1]})

    assert [kind(d) for d in ({"x": X}, (X, Y), X, table, frame)] == [
        "a dict of arrays",
        "a tuple of 2",
        "an array of shape (6, 2)",
        "a pyarrow Table",
        "a pandas DataFrame",
    ]
    assert all(map(is_local_data, ({"x": X}, (X, Y), X, [X, Y], table, table.to_batches()[0], frame)))
    assert not any(map(is_local_data, ("path", 3, None, [X, 1], [], {}, (X, Y, Y))))


def test_big_arrays_are_written_in_parts_and_arrive_whole(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((3000, 1000))

    np.testing.assert_array_equal(opened((x, np.arange(3000)), tmp_path)["x"], x.astype(np.float32))


@pytest.mark.parametrize("size", [1, 4, 9])
def test_workers_share_the_one_folder_of_the_driver(size: int, tmp_path: Path) -> None:
    source = arrow_source((X, Y), scratch=tmp_path)

    assert gathered(source, size, tmp_path) == Y.tolist()
    assert [str(folder) for folder in tmp_path.iterdir()] == [source.folder]


def two_files(folder: Path) -> Source:
    for i in range(2):
        part = slice(3 * i, 3 * i + 3)
        pq.write_table(
            pa.table({"x": list(X[part]), "y": Y[part]}), folder / f"{i}.parquet", row_group_size=2
        )
    return parquet_source(inspect(folder))


@pytest.mark.parametrize("hosts", [["a"], ["a"] * 3, ["a", "b", "a"], ["a"] * 9, ["a", "b", "c"]])
def test_each_row_of_parquet_files_belongs_to_one_worker(hosts: list[str], tmp_path: Path) -> None:
    source = two_files(tmp_path)
    scratch = tmp_path / "scratch"

    assert gathered(source, len(hosts), scratch, hosts=hosts) == Y.tolist()
    assert gathered(source, len(hosts), scratch, "x", hosts=hosts) == X.tolist()


def test_workers_of_a_host_decode_each_row_once_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []

    def noted(files: Any, names: Any, start: int, stop: int) -> Any:
        decoded.append((start, stop))
        return scan(files, names, start, stop)

    monkeypatch.setattr("kindler.data.sources.scan", noted)
    thread_workers.opened(two_files(tmp_path), 3, tmp_path / "scratch", hosts=["a", "b", "a"])

    assert sorted(decoded) == [(0, 3), (0, 6), (3, 6)]


def test_hosts_of_one_name_that_share_no_folder_read_for_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kindler.data.spool._visible", lambda folder: False)

    assert gathered(two_files(tmp_path), 2, tmp_path / "scratch") == Y.tolist()


def test_files_of_different_widths_are_told_though_different_workers_read_them(tmp_path: Path) -> None:
    for width in (2, 3):
        pq.write_table(pa.table({"x": [[1.0] * width] * 4, "y": [0] * 4}), tmp_path / f"{width}.parquet")
    with pytest.raises(DataError, match=r"column 'x': some rows have shape \[2\] and others \[3\]"):
        thread_workers.opened(parquet_source(inspect(tmp_path)), 2, tmp_path / "scratch")


@pytest.mark.parametrize("size", [1, 2, 5])
def test_of_vast_data_each_worker_reads_the_row_groups_it_was_dealt(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = np.arange(1000)
    pq.write_table(pa.table({"x": y * 2.0, "y": y}), tmp_path / "0.parquet", row_group_size=10)
    source = parquet_source(inspect(tmp_path))
    dealing = RowAssignment.between(2, seed=0)
    plain = thread_workers.opened(source, 1, tmp_path / "scratch", assignment=dealing)
    monkeypatch.setattr("kindler.data.sources._VAST_BYTES", 0)

    spools = thread_workers.opened(source, size, tmp_path / "scratch", assignment=dealing)

    assert gathered(source, size, tmp_path / "scratch", assignment=dealing) == y.tolist()
    assert gathered(source, size, tmp_path / "scratch", "x", assignment=dealing) == (y * 2.0).tolist()
    counts = np.bincount(np.concatenate([spool.lanes for spool in spools]), minlength=120)
    assert (counts.min(), counts.max()) == (8, 9)
    if size == 2:
        assert all(len(spool.arrays["y"]) == spool.rows == 500 for spool in spools)
        assert [len(set((own(spool) // 10).tolist())) for spool in spools] == [50, 50], "whole groups"
    assert plain[0].rows == 1000


def test_a_bad_row_of_a_parquet_file_is_named_with_its_file(tmp_path: Path) -> None:
    for i, values in enumerate(([1.0, 2.0], [3.0, None])):
        pq.write_table(pa.table({"x": values, "y": [0, 0]}), tmp_path / f"{i}.parquet")
    source = parquet_source(inspect(tmp_path))

    with pytest.raises(DataError, match=r"column 'x', row 3 \(row 1 of .*1\.parquet\): is null"):
        thread_workers.opened(source, 1, tmp_path / "scratch")


def test_parquet_columns_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": ["a"], "y": [0]}), tmp_path / "0.parquet")
    with pytest.raises(DataError, match="StringIndexer"):
        parquet_source(inspect(tmp_path))


def test_delivered_rows_are_opened_by_name(tmp_path: Path) -> None:
    columns = ColumnPlan(features=(Column(name="y", role="feature"),), labels=())
    with SpoolWriter(tmp_path / "rank-0" / "train", columns.all) as writer:
        writer.append_arrays({"y": Y})

    (spool,) = thread_workers.opened(DeliveredSource(columns, "train"), 1, tmp_path)
    assert own(spool).tolist() == Y.tolist()


def test_delivered_rows_are_numbered_where_their_order_counts(tmp_path: Path) -> None:
    columns = ColumnPlan(features=(Column(name="y", role="feature"),), labels=())
    ids = np.array([0, 1, 2, (3 << ROW_BITS) + 0, (3 << ROW_BITS) + 1, (5 << ROW_BITS) + 0])
    for rank, mine in enumerate(([4, 0], [], [5, 1, 3, 2])):
        with SpoolWriter(tmp_path / f"rank-{rank}" / "train", columns.all) as writer:
            if mine:
                writer.append_arrays({"y": Y[mine]})
                writer.append_order(ids[mine], np.array(mine))
    source = DeliveredSource(columns, "train")

    assert gathered(source, 3, tmp_path, in_order=True) == Y.tolist()
    assert [spool.numbers for spool in thread_workers.opened(source, 3, tmp_path)] == [None] * 3


def test_sources_are_values() -> None:
    columns = ColumnPlan(features=(), labels=())

    assert FolderSource("a", columns) == FolderSource("a", columns)
