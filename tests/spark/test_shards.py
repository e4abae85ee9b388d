"""The facts of shards on the Spark engine, and the ways between it and DataFrames, RDDs and local shards."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

from kindler import XShards
from kindler.errors import DataError, WorkerLostError
from tests.shards_facts import BIG, ShardFacts, same, table

pytestmark = pytest.mark.spark

few = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class TestSparkShards(ShardFacts):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, spark: Any) -> str:
        return "spark"


def test_auto_is_spark_while_a_session_runs(spark: Any) -> None:
    assert XShards.partition(np.arange(4), 2).engine == "spark"


def test_a_spark_frame_has_the_rows_of_the_shards_in_order(spark: Any) -> None:
    frame = XShards.partition(table(), 3).to_spark_df()

    kinds = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
    assert kinds == {
        "key": "string",
        "big": "bigint",
        "maybe": "bigint",
        "real": "double",
        "kind": "string",
        "when": "timestamp_ntz",
        "zone": "timestamp",
        "flag": "boolean",
        "small": "tinyint",
    }
    rows = frame.collect()
    assert [row.big for row in rows] == table()["big"].tolist()
    assert [row.maybe for row in rows] == [None if pd.isna(v) else v for v in table()["maybe"]]
    assert rows[1].real is None


def test_a_spark_frame_of_the_local_home_is_the_same(spark: Any) -> None:
    local, there = (
        XShards.partition(table(), 3, engine=engine).to_spark_df() for engine in ("local", "spark")
    )
    assert local.schema == there.schema
    assert local.collect() == there.collect()


def test_partitions_of_a_frame_become_shards_and_empty_ones_do_not(partitioned: Any) -> None:
    frame = partitioned([[], [(1, "a"), (2, None)], [], [(BIG + 1, "b")]], "`n.x` long, s string")
    shards = XShards.from_spark_df(frame)

    assert [shard["n.x"].tolist() for shard in shards.collect()] == [[1, 2], [BIG + 1]]
    assert shards.first()["s"].tolist() == ["a", None]
    assert [shard.tolist() for shard in shards.transform_shard(len_of)["n"].collect()] == [[2], [1]]


def len_of(shard: Any) -> Any:
    return {"n": np.array([len(shard)])}


def test_a_frame_without_rows_is_one_empty_shard_with_its_columns(spark: Any) -> None:
    (shard,) = XShards.from_spark_df(spark.range(0)).collect()
    assert (list(shard), len(shard), shard["id"].dtype) == (["id"], 0, np.int64)


def test_array_columns_become_cells_of_arrays(spark: Any) -> None:
    frame = spark.createDataFrame([(1, [1.0, 2.0]), (2, [3.0, 4.0])], "n int, v array<double>").coalesce(1)
    shards = XShards.from_spark_df(frame)
    found = shards.assemble_feature_label_cols(["v"], ["n"]).first()

    assert found["x"].tolist() == [[1, 2], [3, 4]]
    assert [list(row.v) for row in shards.to_spark_df().collect()] == [[1.0, 2.0], [3.0, 4.0]]


def test_cells_of_several_types_make_no_spark_frame(spark: Any) -> None:
    shards = XShards.partition(pd.DataFrame({"a": [1, "b", None]}), 1)
    with pytest.raises(DataError, match="column 'a'(.|\n)*several types"):
        shards.to_spark_df()


def test_an_rdd_of_objects_is_a_collection_of_shards(spark: Any) -> None:
    rdd = spark.sparkContext.parallelize([{"x": np.arange(i + 1)} for i in range(5)], 2)
    shards = XShards.from_rdd(rdd)

    assert (shards.num_partitions(), len(shards)) == (5, 15)
    assert [shard["x"].tolist() for shard in shards.collect()] == [list(range(i + 1)) for i in range(5)]


def test_shards_move_between_homes(spark: Any) -> None:
    there = XShards.partition(table(), 3, engine="local").to_engine("spark")
    back = there.to_engine("local")

    assert (there.engine, back.engine) == ("spark", "local")
    assert_frame_equal(back.to_pandas(), table())


def test_shards_larger_than_a_piece_survive(spark: Any) -> None:
    x = np.random.default_rng(0).random((1_000, 5_000))  # 40 MB in one shard
    shards = XShards.partition({"x": x}, 1)
    (found,) = shards.transform_shard(lambda shard: {"x": shard["x"] * 2}).repartition(2).take(1)

    np.testing.assert_array_equal(found["x"], x[:500] * 2)


def test_collections_that_nobody_holds_are_unpersisted(spark: Any) -> None:
    def cached() -> int:
        return int(spark.sparkContext._jsc.getPersistentRDDs().size())

    XShards.partition(np.arange(4), 2).collect()
    gc.collect()
    before = XShards.partition(np.arange(4), 2)  # making a new one frees those
    count = cached()
    for _ in range(3):
        before.transform_shard(lambda shard: shard)
    gc.collect()
    XShards.partition(np.arange(4), 2)

    assert cached() <= count + 1


def test_a_function_that_kills_its_process_is_a_lost_worker(spark: Any) -> None:
    shards = XShards.partition(np.arange(4), 1)
    with pytest.raises(WorkerLostError, match="Spark abandoned its task") as caught:
        shards.transform_shard(lambda shard: os.kill(os.getpid(), signal.SIGKILL))
    assert "at org.apache" not in str(caught.value)


@few
@given(rows=st.integers(1, 40), shards=st.integers(1, 5), count=st.integers(1, 5))
def test_frames_survive_the_way_to_spark_and_back(spark: Any, rows: int, shards: int, count: int) -> None:
    frame = table(rows)
    made = XShards.partition(frame, min(shards, rows))
    again = XShards.from_spark_df(made.to_spark_df())

    same(again.repartition(count).to_pandas(), frame)


@few
@given(rows=st.integers(2, 40), shards=st.integers(1, 5), count=st.integers(1, 5))
def test_arrays_survive_repartition_split_and_zip(spark: Any, rows: int, shards: int, count: int) -> None:
    x, y = np.arange(rows * 3).reshape(rows, 3), np.arange(rows).astype("U")
    one, other = XShards.partition((x, y), min(shards, rows)).repartition(count).split()
    found = one.zip(other).collect()

    np.testing.assert_array_equal(np.concatenate([pair[0] for pair in found]), x)
    np.testing.assert_array_equal(np.concatenate([pair[1] for pair in found]), y)


@pytest.mark.parametrize("engine", ["local", "spark"])
def test_frames_may_have_columns_with_names_of_ours(spark: Any, engine: str) -> None:
    names = ["_kindler_place", "_kindler_row", "_kindler_key0", "row", "row_min"]
    frame = pd.DataFrame({name: [2, 1, 2, 1] for name in names})
    shards = XShards.partition(frame, 2, engine=engine)

    distinct = pd.concat(shards.deduplicates().collect(), ignore_index=True)
    ordered = pd.concat(shards.sort_values("_kindler_place").collect(), ignore_index=True)
    counted = pd.concat(shards.group_by("_kindler_key0", {"row": "sum"}, join=True).collect())

    assert distinct.values.tolist() == [[2] * 5, [1] * 5]
    assert ordered["row"].tolist() == [1, 1, 2, 2]
    assert counted["sum(row)"].tolist() == [4, 2, 4, 2]
