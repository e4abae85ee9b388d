"""Spark DataFrames in a store: written and read by the tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.compute as pc
import pytest

from kindler import Store
from kindler.errors import ConfigError, DataError


@pytest.fixture
def om(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def rows(frame: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in frame.collect()]


def test_a_frame_is_written_and_read_by_the_tasks_in_its_order(
    om: Store, partitioned: Callable[..., Any]
) -> None:
    data = [[(1, "a"), (2, None)], [], [(3, "c")], [(4, "d"), (5, "e")]]
    frame = partitioned(data, "`n.x` int, s string")
    version = om.datasets.put(frame, "frame")

    assert len(version.files) == 3  # one a partition that has rows
    assert version.meta["rows"] == [2, 1, 2]
    again = om.datasets.get("frame")
    assert again.schema == frame.schema
    assert rows(again) == rows(frame)
    assert again.rdd.getNumPartitions() == 3


def test_spark_pandas_and_arrow_read_what_the_others_wrote(om: Store, spark: Any) -> None:
    om.datasets.put(spark.createDataFrame([(1, [0.5, 1.0]), (2, [])], "n long, v array<double>"), "spark")
    om.datasets.put(pd.DataFrame({"n": [3], "v": [[2.0]]}), "spark", mode="append")
    assert om.datasets.get("spark", as_="pandas")["n"].tolist() == [1, 2, 3]
    assert rows(om.datasets.get("spark")) == [(1, [0.5, 1.0]), (2, []), (3, [2.0])]

    om.datasets.put(pd.DataFrame({"n": [1, 2], "c": pd.Categorical(["a", "b"])}), "pandas")
    assert rows(om.datasets.get("pandas", spark=spark)) == [(1, "a"), (2, "b")]
    om.datasets.put(spark.createDataFrame([(4, [1.0])], "n long, v array<double>"), "spark", mode="append")
    assert om.datasets.get("spark", as_="arrow").column("n").to_pylist() == [1, 2, 3, 4]


def test_columns_and_rows_are_chosen_by_the_tasks(om: Store, spark: Any) -> None:
    om.datasets.put(spark.range(0, 100, 1, 4).selectExpr("id", "id * 2 AS twice"), "numbers")

    assert rows(om.datasets.get("numbers", columns=["twice"], id__gt=97)) == [(196,), (198,)]
    assert om.datasets.get("numbers", filter=pc.field("twice") < 10).count() == 5
    with pytest.raises(ConfigError, match="three"):
        om.datasets.get("numbers", columns=["three"])


def test_a_frame_without_rows_keeps_its_columns(om: Store, spark: Any) -> None:
    om.datasets.put(spark.createDataFrame([], "a int, b timestamp"), "empty")
    again = om.datasets.get("empty")
    assert (again.columns, again.count()) == (["a", "b"], 0)


def test_a_blob_that_was_changed_is_found_by_the_task_that_reads_it(
    om: Store, spark: Any, tmp_path: Path
) -> None:
    version = om.datasets.put(spark.range(10), "x")
    blob = next(tmp_path.rglob(version.files[0].sha256))
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    with pytest.raises(Exception, match="damaged"):
        om.datasets.get("x").collect()


def test_what_spark_cannot_store_is_said_before_a_task_starts(om: Store, spark: Any) -> None:
    with pytest.raises(ConfigError, match="stream"):
        om.datasets.put(spark.readStream.format("rate").load(), "stream")
    with pytest.raises(ConfigError, match="memory"):
        Store("memory://").datasets.put(spark.range(1), "x")
    om.datasets.put(spark.range(3), "x")
    with pytest.raises(DataError, match="cannot be appended"):
        om.datasets.put(spark.range(3).selectExpr("id", "id AS b"), "x", mode="append")
    assert len(om.datasets.versions("x")) == 1
