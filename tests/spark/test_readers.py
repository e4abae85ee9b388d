"""The facts of readers on the Spark engine: the executors read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kindler
from kindler.errors import ConfigError
from tests.readers_facts import ReaderFacts, write

pytestmark = pytest.mark.spark


class TestSparkReaders(ReaderFacts):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, spark: Any) -> str:
        return "spark"


def test_shards_that_were_read_are_a_spark_frame_without_passing_the_driver(
    spark: Any, tmp_path: Path
) -> None:
    frame = kindler.read_csv(write(tmp_path, a="x,s\n1,a\n", b="x,s\n0.5,b\n")).to_spark_df()

    assert [tuple(row) for row in frame.collect()] == [(1.0, "a"), (0.5, "b")]
    with pytest.raises(ConfigError, match="does not exist"):
        kindler.read_csv(tmp_path / "nothing")


def test_a_schema_of_spark_says_the_types(tmp_path: Path) -> None:
    from pyspark.sql.types import StructType, YearMonthIntervalType

    pq.write_table(pa.table({"k": [1, 2], "n": [1, 2]}), tmp_path / "a.parquet")

    shards = kindler.read_parquet(tmp_path, schema=StructType().add("k", "float"))

    assert [str(dtype) for dtype in shards.head(1).dtypes] == ["float32", "int64"]
    with pytest.raises(ConfigError, match="column 'k' is of type interval.*which Arrow does not support"):
        kindler.read_parquet(tmp_path, schema=StructType().add("k", YearMonthIntervalType()))
