"""What is written can be read again, and nothing half-written can."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kindler.data.columns import Column
from kindler.data.spool import Spool, SpoolWriter, agreed
from kindler.errors import DataError

X = Column(name="x", role="feature")
Y = Column(name="y", role="label")


def table(rows: int, *, start: int = 0, width: int = 3) -> pa.Table:
    x = np.arange(start * width, (start + rows) * width, dtype=np.float32).reshape(rows, width)
    return pa.table({"x": pa.array(list(x), pa.list_(pa.float32())), "y": np.arange(start, start + rows)})


def written(folder: Path, *tables: pa.Table, rows: int | None = None, ids: Any = None) -> Spool:
    with SpoolWriter(folder, [X, Y], rows=rows) as writer:
        for part in tables:
            writer.append(part)
        if ids is not None:
            writer.append_order(np.asarray(ids))
    return writer.close()


def test_batches_become_one_read_only_array_a_column(tmp_path: Path) -> None:
    spool = written(tmp_path / "s", table(2), table(3, start=2), rows=5)

    assert spool.rows == 5
    assert spool.order is None
    np.testing.assert_array_equal(spool.arrays["x"], np.arange(15).reshape(5, 3))
    assert spool.arrays["x"].dtype == np.float32
    assert spool.arrays["y"].tolist() == [0, 1, 2, 3, 4]
    assert not spool.arrays["x"].flags.writeable


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(
    parts=st.lists(st.integers(0, 7), max_size=5),
    dtype=st.sampled_from(["bool", "int8", "uint16", "int64", "float32"]),
    shape=st.lists(st.integers(0, 3), max_size=2).map(tuple),
)
def test_arrays_of_any_dtype_and_shape_round_trip(
    tmp_path: Path, parts: list[int], dtype: str, shape: tuple[int, ...]
) -> None:
    arrays = [np.arange(rows * int(np.prod(shape))).astype(dtype).reshape(rows, *shape) for rows in parts]
    folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    with SpoolWriter(folder, [X]) as writer:
        for array in arrays:
            writer.append_arrays({"x": array})
    spool = Spool.open(folder)

    assert spool.rows == sum(parts)
    if spool.rows:
        np.testing.assert_array_equal(spool.arrays["x"], np.concatenate(arrays))
        assert spool.layout == {"x": [dtype, list(shape)]}


def test_dealt_rows_are_picked_and_not_copied(tmp_path: Path) -> None:
    spool = written(tmp_path, table(5))
    mine = spool.assigned(np.array([1, 4]), np.array([7, 7]))

    assert (mine.rows, mine.lane_counts(8)) == (2, [0] * 7 + [2])
    assert mine.order is not None
    assert mine.arrays["y"][mine.order].tolist() == [1, 4]
    assert np.shares_memory(mine.arrays["x"], spool.arrays["x"])
    assert spool.assigned(np.arange(5), np.zeros(5, int)).order is None, "all of them lie in their order"


def test_rows_that_arrive_out_of_order_get_an_order(tmp_path: Path) -> None:
    spool = written(tmp_path, table(4), ids=[30, 10, 40, 20])

    assert spool.order is not None
    assert spool.arrays["y"][spool.order].tolist() == [1, 3, 0, 2]
    part = spool.assigned(np.array([1, 2]), np.array([0, 1]))
    assert part.order is not None
    assert (part.rows, part.arrays["y"][part.order].tolist()) == (2, [3, 0])


def test_rows_may_come_with_their_lanes(tmp_path: Path) -> None:
    with SpoolWriter(tmp_path, [X, Y]) as writer:
        writer.append(table(3))
        writer.append_order(np.array([30, 10, 20]), np.array([3, 1, 2]))
    spool = writer.close()

    assert np.array_equal(spool.numbers, [10, 20, 30])
    assert np.array_equal(spool.lanes, [1, 2, 3])
    joined = spool.with_lanes(2)
    assert {lane: rows.tolist() for lane, rows in joined.by_lane(0).items()} == {0: [1], 1: [0, 2]}


def test_several_writers_fill_one_spool(tmp_path: Path) -> None:
    whole = table(7)
    writers = [
        SpoolWriter(tmp_path, [X, Y], rows=stop - start, first=start)
        for start, stop in ((0, 3), (3, 3), (3, 7))
    ]
    for writer, (start, stop) in reversed(list(zip(writers, ((0, 3), (3, 3), (3, 7)), strict=True))):
        writer.__enter__()
        if stop > start:
            writer.append(whole.slice(start, stop - start))
        writer.flush()
    layout = agreed([writer.layout() for writer in writers])
    shutil.rmtree(tmp_path)

    for writer in writers:
        spool = writer.whole(7, layout)
        assert spool.arrays["y"].tolist() == list(range(7))
        np.testing.assert_array_equal(spool.arrays["x"], np.stack(whole.column("x").to_pylist()))


def test_rows_that_arrive_in_order_need_none(tmp_path: Path) -> None:
    assert written(tmp_path, table(3), ids=[1, 5, 9]).order is None


def test_ids_for_another_number_of_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 row ids for 3 rows"):
        written(tmp_path, table(3), ids=[1, 2])


def test_widths_must_agree_across_batches(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"column 'x', row 2: has float32 values of shape \(4,\) where earlier"
    ):
        written(tmp_path, table(2), table(1, width=4))


def test_rows_are_counted_through_in_complaints(tmp_path: Path) -> None:
    bad = pa.table({"x": pa.array([[1.0], None]), "y": [0, 1]})
    with pytest.raises(DataError, match="column 'x', row 4: is null"):
        written(tmp_path, table(3), bad)


def test_a_missing_column_is_named_with_those_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"column 'y': is not in the data, which has \['x'\]"):
        written(tmp_path, table(1).select(["x"]))


def test_another_number_of_rows_than_announced_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="4 rows were expected and 3 arrived"):
        written(tmp_path, table(3), rows=4)


def test_what_failed_on_the_way_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all rows must have the same dtype and shape"):
        written(tmp_path, table(2), table(1, width=4))
    with pytest.raises(DataError, match="is not a finished spool"):
        Spool.open(tmp_path)


def test_a_truncated_file_is_an_error_and_no_crash(tmp_path: Path) -> None:
    written(tmp_path, table(3))
    with open(tmp_path / "000.bin", "r+b") as file:
        file.truncate(5)
    with pytest.raises(DataError, match="5 bytes where 36 were written"):
        Spool.open(tmp_path)


def test_an_empty_spool_takes_its_layout_from_the_others(tmp_path: Path) -> None:
    full = written(tmp_path / "full", table(2))
    empty = written(tmp_path / "empty")

    assert empty.layout == {"x": [None, None], "y": [None, None]}
    filled = empty.with_layout(agreed([empty.layout, full.layout]))
    assert filled.arrays["x"].shape == (0, 3)
    assert (filled.arrays["y"].shape, filled.arrays["y"].dtype) == ((0,), np.int64)
    json.dumps(filled.layout)


def test_an_empty_spool_knows_what_was_asked_for(tmp_path: Path) -> None:
    with SpoolWriter(tmp_path, [Column(name="x", role="feature", dtype="uint8", shape=(2, 2))]) as writer:
        pass

    assert writer.close().layout == {"x": ["uint8", [2, 2]]}
    assert writer.close().arrays["x"].shape == (0, 2, 2)


def test_workers_with_different_widths_are_told(tmp_path: Path) -> None:
    one = written(tmp_path / "1", table(1)).layout
    two = written(tmp_path / "2", table(1, width=4)).layout
    with pytest.raises(DataError, match=r"column 'x': some rows have shape \[3\] and others \[4\]"):
        agreed([one, two])


def test_a_mark_tells_rows_and_their_order_from_others() -> None:
    x, y = np.arange(20_000.0).reshape(-1, 2), np.arange(10_000)
    backwards = np.arange(10_000)[::-1]
    whole = Spool(rows=10_000, arrays={"x": x, "y": y})

    every = np.arange(10_000)

    assert whole.fingerprint(every) == Spool(rows=10_000, arrays={"y": y.copy(), "x": x.copy()}).fingerprint(
        every
    )
    arrived = Spool(rows=10_000, arrays={"x": x[::-1], "y": y[::-1]}, order=backwards)
    assert arrived.fingerprint(every) == whole.fingerprint(every), (
        "rows that arrived in another order are in their own"
    )
    others = [
        Spool(rows=10_000, arrays={"x": x, "y": y}, order=backwards).fingerprint(every),
        whole.fingerprint(every[:-1]),
        Spool(rows=10_000, arrays={"x": np.roll(x, 1, axis=0), "y": y}).fingerprint(every),
        whole.fingerprint(every[:0]),
        whole.fingerprint(every[::2], parts=2),
        whole.fingerprint(every[1::2], parts=2),
    ]
    assert len({whole.fingerprint(every), *others}) == 7
