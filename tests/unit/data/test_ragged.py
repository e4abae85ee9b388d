"""Columns whose rows differ in length: kept as they are, through Arrow, spools and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kindler.data import parquet
from kindler.data.column_options import ColumnOptions
from kindler.data.columns import Column
from kindler.data.ragged import Ragged, concatenated, to_ragged
from kindler.data.row_order import RowAssignment
from kindler.data.sources import arrow_source, parquet_source
from kindler.data.spool import Spool, SpoolWriter, agreed
from kindler.errors import DataError
from kindler.testing import thread_workers

LISTS = [[3, 1], [], [4, 1, 5], [9]]
FRAMES = [[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]], [], [[7.0, 8.0]]]
VALUES: dict[str, tuple[Any, pa.DataType]] = {
    "tokens": (LISTS, pa.list_(pa.int64())),
    "wide": (LISTS, pa.large_list(pa.int32())),
    "frames": (FRAMES, pa.list_(pa.list_(pa.float64()))),
    "text": (["a", "", "größe", "zwei\nZeilen"], pa.string()),
    "png": ([b"\x00\xff", b"", b"abc", b"\n"], pa.binary()),
    "words": ([["a", "b"], [], ["ü"], ['"']], pa.list_(pa.string())),
}


def column(name: str) -> Column:
    return Column(name=name, role="feature", ragged=True)


def plain(rows: Any) -> list[Any]:
    return [row.tolist() if isinstance(row, np.ndarray) else row for row in rows]


def ragged(name: str) -> Ragged:
    values, kind = VALUES[name]
    return to_ragged(pa.array(values, kind), column(name), where=lambda i: i)


@pytest.mark.parametrize("name", VALUES)
def test_rows_come_out_as_they_went_in_however_they_are_cut_and_joined(name: str) -> None:
    values, kind = VALUES[name]
    whole = ragged(name)

    assert plain(whole.rows()) == values
    assert plain(whole[1:3]) == values[1:3]
    assert plain(whole.take(np.array([3, 0, 0]))) == [values[3], values[0], values[0]]
    assert plain([whole[2]]) == [values[2]]
    assert plain(concatenated([whole[2:], whole[:1], whole[1:1]])) == [*values[2:], values[0]]
    again = to_ragged(whole[1:].to_arrow(), column(name), where=lambda i: i)
    assert plain(again) == values[1:]
    chunks = pa.chunked_array([pa.array(values[:1], kind), pa.array([], kind), pa.array(values[1:], kind)])
    assert plain(to_ragged(chunks, column(name), where=lambda i: i)) == values


def test_dtypes_follow_the_rules_of_all_columns() -> None:
    label = Column(name="y", role="label", ragged=True)
    small = pa.array(LISTS, pa.list_(pa.int16()))

    assert ragged("frames").flat.dtype == np.float32
    assert ragged("frames").entry == ["float32", [None, 2]]
    assert to_ragged(small, column("x"), where=str).flat.dtype == np.int16
    assert to_ragged(small, label, where=str).flat.dtype == np.int64
    assert [ragged("text").entry, ragged("words").entry] == [["str", []], ["str", [None]]]


@pytest.mark.parametrize(
    ("values", "kind", "problem"),
    [
        ([[1.0], None, [2.0]], pa.list_(pa.float32()), "row 11: is null"),
        ([[1.0], [2.0, None], [2.0]], pa.list_(pa.float32()), "row 11: is null"),
        ([[1.0], [2.0, float("nan")], [2.0]], pa.list_(pa.float32()), "row 11: is NaN"),
        (["a", None, "b"], pa.string(), "row 11: is null"),
        ([["a"], ["b", None], []], pa.list_(pa.string()), "row 11: holds a null"),
        (
            [[[1.0, 2.0]], [[3.0]], []],
            pa.list_(pa.list_(pa.float32())),
            "row 11: .*all rows must have the same",
        ),
    ],
)
def test_what_no_model_takes_is_named_by_column_and_row(values: Any, kind: pa.DataType, problem: str) -> None:
    with pytest.raises(DataError, match=f"column 'x', {problem}"):
        to_ragged(pa.array(values, kind), column("x"), where=lambda i: 10 + i)


def test_a_spool_keeps_rows_of_different_lengths_and_marks_them(tmp_path: Path) -> None:
    columns = [column(name) for name in VALUES]
    table = pa.table({name: pa.array(values, kind) for name, (values, kind) in VALUES.items()})
    with SpoolWriter(tmp_path, columns, rows=4) as writer:
        writer.append(table.slice(0, 1).to_batches()[0])
        writer.append(table.slice(1).to_batches()[0])
    spool = Spool.open(tmp_path)

    for name, (values, _) in VALUES.items():
        assert plain(spool.arrays[name]) == values
    assert spool.fingerprint(np.arange(4)) != spool.fingerprint(np.arange(4)[::-1])
    empty = Spool(rows=0, arrays={}).with_layout(spool.layout)
    assert {name: len(array) for name, array in empty.arrays.items()} == dict.fromkeys(VALUES, 0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_workers_of_one_host_write_one_spool_of_ragged_rows(tmp_path: Path, size: int) -> None:
    rows = 50
    lists = [list(range(i, i + i % 7)) for i in range(rows)]
    texts = ["x" * (i % 5) + str(i) for i in range(rows)]
    table = pa.table({"x": pa.array(lists), "t": pa.array(texts), "y": pa.array(range(rows))})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=7)
    options = ColumnOptions(feature_cols=["x", "t"], label_cols="y", ragged="all")
    source = parquet_source(parquet.inspect(str(tmp_path / "rows.parquet")), options)
    dealing = RowAssignment.between(size, seed=1)

    spools = thread_workers.opened(source, size, tmp_path / "scratch", assignment=dealing)
    layout = agreed([spool.layout for spool in spools])
    found = {}
    for spool in (spool.with_layout(layout) for spool in spools):
        places = np.arange(spool.rows) if spool.order is None else spool.order
        own = [spool.arrays[name][places] for name in ("x", "t", "y")]
        found |= {int(y): (x.tolist(), t) for x, t, y in zip(own[0], own[1], own[2], strict=True)}

    assert found == {i: (lists[i], texts[i]) for i in range(rows)}


def test_data_in_memory_is_ragged_where_it_was_asked_for(tmp_path: Path) -> None:
    data = {
        "x": [[1, 2], [3]],
        "t": np.array(["a", "bc"]),
        "b": [b"1", b"23"],
        "f": np.ones((2, 3)),
        "y": [0, 1],
    }
    options = ColumnOptions(feature_cols=["x", "t", "b", "f"], label_cols="y", ragged="all")

    source = arrow_source(data, options, scratch=tmp_path)
    arrays = Spool.open(source.folder).arrays

    assert {c.name for c in source.columns.all if c.ragged} == {"x", "t", "b"}
    assert plain(arrays["x"]) == [[1, 2], [3]]
    assert plain(arrays["t"]) == ["a", "bc"]
    assert arrays["f"].shape == (2, 3)
    with pytest.raises(DataError, match="(?s)column 'x', row 1: .*pad=\"batch\""):
        arrow_source(data, ColumnOptions(feature_cols="x", label_cols="y"), scratch=tmp_path)
