"""Doubles travel as floats, and the worker gets the values and complaints of the frame itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from kindler.data.column_options import ColumnOptions
from kindler.data.columns import ColumnPlan, to_numpy
from kindler.data.row_order import RowAssignment
from kindler.errors import DataError
from kindler.spark.frames import Feed, arrow_types, feed_frame, frame_error, own_columns
from kindler.spark.versions import to_arrow

pytestmark = pytest.mark.spark

KINDS = ("double", "float", "int", "tinyint", "bigint")


def planned(frame: Any, **options: Any) -> ColumnPlan:
    names = [name for name in frame.columns if name != "label"]
    return ColumnOptions(feature_cols=names, label_cols=["label"], **options).plan(arrow_types(frame))


def sent(frame: Any, columns: ColumnPlan) -> pa.Table:
    return to_arrow(
        feed_frame([Feed(name="data", frame=frame, columns=columns)], 1, RowAssignment.between(1, seed=0))
    )


@pytest.fixture(scope="module")
def wide(spark: Any) -> Any:
    """Runs of columns of each type, and one array."""
    numbers = [
        F.expr(f"CAST(id * {i + 1} % 100 AS {kind})").alias(f"{kind}{i}") for kind in KINDS for i in range(4)
    ]
    array = F.expr("array(CAST(id AS double) / 3, 0.1D, -1e-40D)").alias("many.doubles")
    return spark.range(0, 50, 1, 2).select(*numbers, array, (F.col("id") / 7).alias("label"))


def test_a_worker_reads_the_values_that_the_frame_itself_has(wide: Any) -> None:
    columns = planned(wide)
    table = sent(wide, columns)

    assert "double" not in str(table.schema)
    got = pa.concat_tables(
        [pa.Table.from_batches([own_columns(batch, columns.names, 0)]) for batch in table.to_batches()]
    )
    expected = to_arrow(wide.select(*[F.col(f"`{name}`") for name in columns.names]))
    order = np.argsort(got.column("label").to_numpy())
    for column in columns.all:
        mine = to_numpy(got.column(column.name), column, where=str)[order]
        assert mine.dtype == to_numpy(expected.column(column.name), column, where=str).dtype
        np.testing.assert_array_equal(mine, to_numpy(expected.column(column.name), column, where=str))


def test_a_double_that_was_asked_for_stays_one(wide: Any) -> None:
    columns = planned(wide, dtypes={f"double{i}": "float64" for i in range(4)})

    assert [str(kind) for kind in sent(wide, columns).schema.types[:4]] == ["double"] * 4


@pytest.mark.parametrize("kind", ["double", "array<double>"])
def test_a_value_that_a_float_cannot_hold_is_told_with_column_and_row(spark: Any, kind: str) -> None:
    big = "CASE WHEN id = 8 THEN 1e300D WHEN id = 3 THEN double('-inf') ELSE id END"
    value = F.expr(big if kind == "double" else f"array(double('nan'), double({big}))")
    frame = spark.range(0, 10, 1, 2).select(value.alias("x"), F.lit(1.0).alias("label"))
    columns = planned(frame, allow_nan=True)

    with pytest.raises(Exception, match="DOES_NOT_FIT") as caught:
        sent(frame, columns)
    error = frame_error(caught.value, [(frame, columns.names)])

    assert isinstance(error, DataError)
    assert str(error).startswith("column 'x', row 3 of partition 1: 1e+300 (float64) does not fit float32.")
    # What is infinite already stays so, and the largest double that rounds to a float does.
    largest = float(np.nextafter(2.0**128 - 2.0**103, 0))
    value = F.expr(f"CASE WHEN id = 3 THEN double('-inf') ELSE {largest!r}D END")
    frame = spark.range(4).select(
        (value if kind == "double" else F.array(value)).alias("x"), F.lit(1.0).alias("label")
    )
    got = np.array([float(np.ravel(v)[0]) for v in sent(frame, planned(frame)).column(0).to_pylist()])
    assert sorted(got) == sorted([-np.inf] + [float(np.finfo("float32").max)] * 3)
