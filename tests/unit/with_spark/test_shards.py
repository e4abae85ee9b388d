"""The shards of the Spark engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from kindler.data.shards.codec import pack
from kindler.spark.shards import SparkShards
from kindler.testing.shards import Put, ShardBackendContract
from tests.unit.shards.flat_columns import assert_arrays_are_flat_columns

pytestmark = pytest.mark.spark


class TestSparkBackend(ShardBackendContract):
    @pytest.fixture
    def put(self, spark: Any) -> Put:
        return partial(SparkShards.of, spark)


def test_arrays_become_a_frame_of_packed_rows(spark: Any) -> None:
    x, y = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6)
    rows = (
        SparkShards.of(spark, map(pack, [(x[:3], y[:3]), (x[3:], y[3:])])).packed_frame(["x", "y"]).collect()
    )

    assert [np.frombuffer(row.x, np.float32).tolist() for row in rows] == x.tolist()
    assert [int(np.frombuffer(row.y, np.int64)[0]) for row in rows] == y.tolist()


def test_arrays_are_flat_columns_for_whoever_feeds_a_model(spark: Any) -> None:
    assert_arrays_are_flat_columns("spark")
