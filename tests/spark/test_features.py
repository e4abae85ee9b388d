"""The facts of feature transformers on Spark DataFrames and the Spark engine, and Spark ML as the judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.ml import feature as spark_ml
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F

from kindler import XShards
from kindler.errors import DataError
from kindler.features import MinMaxScaler, StandardScaler, StringIndexer
from tests.features_facts import CITIES, NAMES, NUMBERS, Back, FeatureFacts, Give, close

pytestmark = pytest.mark.spark


class TestSparkFrames(FeatureFacts):
    @pytest.fixture
    def give(self, spark: Any) -> Give:
        return lambda frame: XShards.partition(frame, 2, engine="spark").to_spark_df()

    @pytest.fixture
    def back(self) -> Back:
        return lambda frame: XShards.from_spark_df(frame).to_pandas()


def test_shards_of_the_spark_home_are_transformed_there(spark: Any) -> None:
    shards = XShards.partition(NUMBERS.assign(city=[str(i % 3) for i in range(12)]), 3, engine="spark")
    found = MinMaxScaler(input_col=NAMES).fit_transform(StringIndexer("city").fit_transform(shards))

    assert (found.engine, found.num_partitions()) == ("spark", 3)
    pd.testing.assert_frame_equal(
        found.to_pandas(),
        MinMaxScaler(input_col=NAMES).fit_transform(NUMBERS.assign(city=[i % 3 for i in range(12)])),
    )


def test_indices_are_those_of_spark_ml(spark: Any) -> None:
    frame = spark.createDataFrame([(city,) for city in CITIES], "city string")
    for ours, theirs in (("keep", "keep"), ("skip", "skip")):
        fitted = spark_ml.StringIndexer(inputCol="city", outputCol="i", handleInvalid=theirs).fit(frame)
        indexer = StringIndexer("city", "i", handle_invalid=ours).fit(frame)

        assert indexer.labels_["city"] == list(fitted.labels)
        assert indexer.transform(frame).collect() == fitted.transform(frame).collect()


def test_scaled_vectors_are_those_of_spark_ml(spark: Any) -> None:
    numbers = NUMBERS.fillna(0.5).assign(far=lambda frame: frame["far"] - 1e8)  # Spark ML loses digits there
    rows = [(row,) for row in numbers[NAMES].to_numpy().tolist()]
    frame = spark.createDataFrame(rows, "a array<double>").select(array_to_vector("a").alias("v"))
    pairs = [
        (StandardScaler(input_col="v", output_col="w"), spark_ml.StandardScaler(inputCol="v", outputCol="w")),
        (
            StandardScaler(True, False, input_col="v", output_col="w"),
            spark_ml.StandardScaler(withMean=True, withStd=False, inputCol="v", outputCol="w"),
        ),
        (MinMaxScaler(-1, 1, "v", "w"), spark_ml.MinMaxScaler(min=-1, max=1, inputCol="v", outputCol="w")),
    ]
    for ours, theirs in pairs:
        found = np.array([row.w for row in ours.fit_transform(frame).collect()])
        wanted = np.array([row.w.toArray() for row in theirs.fit(frame).transform(frame).collect()])
        if isinstance(ours, MinMaxScaler):
            wanted[:, 2] = -1  # Spark ML puts constants in the middle
        close(found, wanted)


def test_transform_is_lazy_and_an_unknown_value_is_named_when_rows_are_computed(spark: Any) -> None:
    indexer = StringIndexer("a.b").fit(pd.DataFrame({"a.b": ["x"]}))
    lazy = indexer.transform(spark.createDataFrame([("x", 1), ("new", 2)], "`a.b` string, n int"))

    assert lazy.columns == ["a.b", "n"]
    assert lazy.select("n").count() == 2
    with pytest.raises(Exception, match="column 'a.b': 'new' was not seen"):
        lazy.collect()


def test_order_and_partitions_of_rows_stay(spark: Any) -> None:
    frame = spark.range(0, 1000, 1, 7).select("id", (F.col("id") % 13).cast("string").alias("s"))
    found = StringIndexer("s", "i").fit_transform(frame)

    assert [row.id for row in found.collect()] == list(range(1000))
    assert found.rdd.getNumPartitions() == 7


def test_a_stream_is_transformed(spark: Any, tmp_path: Path) -> None:
    spark.createDataFrame([("a", 1.0), ("b", 3.0)], "s string, x double").write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema("s string, x double").parquet(str(tmp_path / "in"))
    batch = spark.read.parquet(str(tmp_path / "in"))
    changed = (
        MinMaxScaler(input_col="x").fit(batch).transform(StringIndexer("s").fit(batch).transform(stream))
    )
    query = changed.writeStream.format("memory").queryName("changed").trigger(availableNow=True).start()
    query.awaitTermination(60)

    assert sorted(tuple(row) for row in spark.table("changed").collect()) == [(0, 0.0), (1, 1.0)]


def test_ragged_vectors_are_refused(spark: Any) -> None:
    frame = spark.createDataFrame([([1.0],), ([1.0, 2.0],)], "v array<double>")
    with pytest.raises(DataError, match="column 'v': some vectors have 1 values and others more"):
        MinMaxScaler(input_col="v").fit(frame)
    scaler = MinMaxScaler(input_col="v").fit(frame.where("size(v) = 1"))
    with pytest.raises(Exception, match="has 2 values where the scaler was fitted on 1"):
        scaler.transform(frame).collect()
