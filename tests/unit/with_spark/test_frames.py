"""The frame that brings the rows of several frames to the workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from kindler.data.column_options import ColumnOptions
from kindler.data.columns import Column, ColumnPlan
from kindler.data.row_order import RowAssignment
from kindler.spark.frames import FEED, LANE, ROW, Feed, feed_frame, own_columns, partition_keys

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("no_workers_left")]


def test_feeds_of_different_types_keep_their_own(spark: Any) -> None:
    kinds = ("int", "long")
    feeds = []
    for kind in kinds:
        frame = spark.range(3).selectExpr(f"cast(id AS {kind}) AS x", "1f AS y")
        columns = ColumnOptions(feature_cols="x", label_cols="y").plan(frame.columns)
        feeds.append(Feed(name=kind, frame=frame, columns=columns))

    dealing = RowAssignment.between(1, seed=0)
    batches = feed_frame(feeds, 1, dealing).toArrow().combine_chunks().to_batches()

    for number, kind in enumerate((pa.int32(), pa.int64())):
        part = batches[0].filter(pa.array(batches[0].column("_kindler_feed").to_numpy() == number))
        own = own_columns(part, ["x", "y"], number)
        assert (own.schema.field("x").type, sorted(own.column("x").to_pylist())) == (kind, [0, 1, 2])
        assert own.column("y").to_pylist() == [1.0] * 3


@pytest.mark.parametrize("partitions", [1, 2, 3, 7, 64])
def test_keys_lead_to_the_partitions_they_are_for(spark: Any, partitions: int) -> None:
    keys = spark.createDataFrame([(key,) for key in partition_keys(partitions)], "key int")
    found = keys.select(F.pmod(F.hash("key"), F.lit(partitions)).alias("at")).toPandas()["at"]

    assert found.tolist() == list(range(partitions))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_rows_reach_the_partitions_of_their_lanes(spark: Any, workers: int) -> None:
    columns = ColumnPlan(features=(Column(name="id", role="feature"),), labels=())
    feeds = [Feed(name=name, frame=spark.range(0, 5000, 1, 3), columns=columns) for name in ("a", "b")]
    dealing = RowAssignment.between(2, seed=3)

    rows = feed_frame(feeds, workers, dealing).withColumn("at", F.spark_partition_id()).toPandas()

    assert set(rows.columns) == {"c0", ROW, LANE, FEED, "at"}
    assert (rows[LANE] % workers == rows["at"]).all()
    train = rows[rows[FEED] == 0].sort_values(ROW)
    assert train["c0"].tolist() == list(range(5000))
    counts = np.bincount(train[LANE], minlength=120)
    assert counts.max() - counts.min() <= 3, "each of the three partitions ends where it ends"
    for period in (2, 3, 12):
        share = np.bincount(train["c0"] % period, weights=train[LANE] % 2 == 0)
        assert abs(share - 2500 / period).max() < 4 * np.sqrt(5000 / period / 4)
