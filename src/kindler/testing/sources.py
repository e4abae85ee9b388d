"""The contract of a source of rows, as tests to subclass.

    class TestMySource(SourceSuite):
        @pytest.fixture
        def make_source(self, tmp_path):
            def make(table, columns):
                pq.write_table(table, tmp_path / "rows.parquet")
                return MySource(tmp_path / "rows.parquet", columns.plan(table.column_names))

            return make

`table` is a `pyarrow.Table`, and `columns` the `ColumnOptions` that say what to read of it. Where someone
else brings rows to the workers, as Spark does, override `open_source` too.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pytest

from kindler.data.column_options import ColumnOptions
from kindler.data.columns import Array, to_numpy
from kindler.data.row_order import RowAssignment
from kindler.data.sources import Source
from kindler.data.spool import Spool, agreed
from kindler.errors import DataError
from kindler.testing import thread_workers

MakeSource: TypeAlias = Callable[[pa.Table, ColumnOptions], Source]

_XY = ColumnOptions(feature_cols="x", label_cols="y")


class OpenSource(Protocol):
    """Opens a source as all ranks of a gang do."""

    def __call__(
        self, source: Source, size: int, assignment: RowAssignment, *, in_order: bool = False
    ) -> list[Spool]: ...


class SourceSuite:
    """Every row is read once, by any worker; values, order and errors are as for all sources."""

    @pytest.fixture
    def make_source(self) -> MakeSource:
        """Makes a source of a table's rows, in their order."""
        raise NotImplementedError("define the fixture make_source")

    @pytest.fixture
    def open_source(self, tmp_path: Path) -> OpenSource:
        """Opens a source that workers read by themselves."""

        def open_(
            source: Source, size: int, assignment: RowAssignment, *, in_order: bool = False
        ) -> list[Spool]:
            travelled = pickle.loads(pickle.dumps(source))
            scratch = tmp_path / "scratch"
            return thread_workers.opened(travelled, size, scratch, assignment=assignment, in_order=in_order)

        return open_

    @pytest.mark.parametrize("rows", [1, 2, 25])
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_every_row_belongs_to_exactly_one_rank(
        self, make_source: MakeSource, open_source: OpenSource, rows: int, size: int
    ) -> None:
        spools = _agreed(
            open_source(make_source(_table(rows), _XY), size, RowAssignment.between(size, seed=1))
        )

        assert sum(spool.rows for spool in spools) == rows
        assert sorted(np.concatenate([_own(spool, "y") for spool in spools]).tolist()) == list(range(rows))
        for spool in spools:
            np.testing.assert_array_equal(_own(spool, "x"), _features(_own(spool, "y")))

    def test_a_rank_without_rows_learns_dtypes_and_shapes_from_the_others(
        self, make_source: MakeSource, open_source: OpenSource
    ) -> None:
        spools = _agreed(open_source(make_source(_table(1), _XY), 3, RowAssignment.between(3, seed=0)))

        assert sorted(spool.rows for spool in spools) == [0, 0, 1]
        for x, y in ((spool.arrays["x"], spool.arrays["y"]) for spool in spools):
            assert (x.dtype.name, x.shape[1:], y.dtype.name, y.shape[1:]) == ("float32", (3,), "int64", ())

    def test_dtypes_and_shapes_are_those_that_columns_have_everywhere(
        self, make_source: MakeSource, open_source: OpenSource
    ) -> None:
        given = {
            "single": pa.array([0.5, 1.5, 2.5], pa.float32()),
            "double": pa.array([0.5, 1.5, 2.5], pa.float64()),
            "whole": pa.array([1, -2, 3], pa.int32()),
            "flag": pa.array([True, False, True]),
            "vector": pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float64())),
            "matrix": pa.array([[[1.0, 2.0], [3.0, 4.0]]] * 3, pa.list_(pa.list_(pa.float32()))),
            "y": pa.array([0, 1, 2], pa.int32()),
        }
        columns = ColumnOptions(feature_cols=[name for name in given if name != "y"], label_cols="y")
        planned = columns.plan({name: array.type for name, array in given.items()})

        (spool,) = open_source(
            make_source(pa.table(given), columns), 1, RowAssignment.between(1, seed=0), in_order=True
        )

        for column in planned.all:
            expected = to_numpy(given[column.name], column, where=str)
            np.testing.assert_array_equal(_in_order(spool, column.name), expected, strict=True)

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_rows_that_are_taken_in_order_know_their_places_in_the_data(
        self, make_source: MakeSource, open_source: OpenSource, size: int
    ) -> None:
        source = make_source(_table(25), _XY)
        spools = open_source(source, size, RowAssignment.between(size, seed=4), in_order=True)

        for spool in spools:
            numbers = np.empty(0, np.int64) if spool.numbers is None else spool.numbers
            assert numbers.tolist() == _own(spool, "y").tolist()

    def test_a_row_has_the_same_lane_whatever_the_number_of_ranks(
        self, make_source: MakeSource, open_source: OpenSource
    ) -> None:
        source, assignment = make_source(_table(250), _XY), RowAssignment.between(2, seed=3)
        lanes_by_size = []
        for size in (1, 2, 3):
            lane_of: dict[int, int] = {}
            for rank, spool in enumerate(open_source(source, size, assignment)):
                lanes = np.empty(0, np.int32) if spool.lanes is None else spool.lanes
                assert (lanes % size == rank).all()
                lane_of.update(zip(_own(spool, "y").tolist(), lanes.tolist(), strict=True))
            lanes_by_size.append(lane_of)

        assert lanes_by_size[0] == lanes_by_size[1] == lanes_by_size[2]

    def test_opened_again_it_gives_the_same_rows_in_the_same_order(
        self, make_source: MakeSource, open_source: OpenSource
    ) -> None:
        source, assignment = make_source(_table(25), _XY), RowAssignment.between(2, seed=0)
        first, second = (open_source(source, 2, assignment, in_order=True) for _ in range(2))

        for one, other in zip(first, second, strict=True):
            np.testing.assert_array_equal(_in_order(one, "y"), _in_order(other, "y"))
            assert one.by_lane(0).keys() == other.by_lane(0).keys()

    @pytest.mark.parametrize(
        ("values", "shapes"),
        [
            ([[1.0, 2.0], None, [5.0, 6.0]], None),
            ([[1.0, 2.0], [3.0, None], [5.0, 6.0]], None),
            ([[1.0, 2.0], [3.0, float("nan")], [5.0, 6.0]], None),
            ([[1.0, 2.0], [3.0], [5.0, 6.0]], None),
            ([[1.0, 2.0], [3.0], [5.0, 6.0]], {"x": (2,)}),
        ],
        ids=["null", "null inside", "NaN", "ragged", "wrong width"],
    )
    def test_a_value_that_no_model_takes_is_an_error_with_its_column_and_row(
        self, make_source: MakeSource, open_source: OpenSource, values: Sequence[Any], shapes: Any
    ) -> None:
        table = pa.table({"x": pa.array(values, pa.list_(pa.float32())), "y": [0, 1, 2]})
        columns = ColumnOptions(feature_cols="x", label_cols="y", shapes=shapes)

        with pytest.raises(DataError, match="column 'x', row 1") as caught:
            open_source(make_source(table, columns), 1, RowAssignment.between(1, seed=0))
        assert caught.value.column == "x"


def _table(rows: int) -> pa.Table:
    numbers = np.arange(rows)
    return pa.table({"x": pa.array(list(_features(numbers)), pa.list_(pa.float32())), "y": numbers})


def _features(numbers: Array) -> Array:
    return (numbers[:, None] * 10 + np.arange(3)).astype(np.float32)


def _agreed(spools: Sequence[Spool]) -> list[Spool]:
    """What a run makes of them: a rank without rows cannot know by itself what the columns are."""
    layout = agreed([spool.layout for spool in spools])
    return [spool.with_layout(layout) for spool in spools]


def _own(spool: Spool, name: str) -> Array:
    """A worker's own rows, in their natural order."""
    array: Array = spool.arrays[name]
    return array[: spool.rows] if spool.order is None else array[spool.order]


def _in_order(spool: Spool, name: str) -> Array:
    """The same, in the order of their places in the data."""
    rows = _own(spool, name)
    return rows if spool.numbers is None else rows[np.argsort(spool.numbers)]
