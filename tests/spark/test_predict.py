"""Scoring a frame: lazy, one pass, every row with its own prediction, everything else untouched."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Columns, Estimator
from kindler.errors import ConfigError

pytestmark = pytest.mark.spark

SIZES = [1, 4000, 0, 17, 2982, 1000, 2000]  # 7 uneven partitions of 10,000 rows
SCHEMA = "id long, name string, features array<float>, day date"


def frame_of_ten_thousand(partitioned: Callable[..., Any]) -> Any:
    import datetime

    numbers = iter(range(sum(SIZES)))
    day = datetime.date(2026, 1, 1)
    rows = [
        [(i, f"row {i}", [float(i), i / 7], day) for i in (next(numbers) for _ in range(size))]
        for size in SIZES
    ]
    return partitioned(rows, SCHEMA)


def identity(**options: Any) -> Estimator:
    return Estimator.from_torch(model=nn.Identity(), **options)


def test_identity_predicts_the_features_row_for_row_and_leaves_the_rest(
    partitioned: Callable[..., Any],
) -> None:
    frame = frame_of_ten_thousand(partitioned)

    scored = identity().predict(frame, batch_size=64, feature_cols="features")

    before, after = frame.collect(), scored.collect()
    assert scored.columns == [*frame.columns, "prediction"]
    assert [row[:4] for row in after] == [tuple(row) for row in before]
    assert all(row.prediction == row.features for row in after)


def test_a_streaming_frame_is_scored_as_it_arrives(
    tmp_path: Path, spark: Any, partitioned: Callable[..., Any]
) -> None:
    frame = frame_of_ten_thousand(partitioned)
    frame.write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(frame.schema).parquet(str(tmp_path / "in"))
    est = identity()

    scored = est.predict(stream, feature_cols="features", columns=Columns(shapes={"features": (2,)}))
    query = (
        scored.writeStream.format("parquet")
        .option("path", str(tmp_path / "out"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)

    rows = spark.read.parquet(str(tmp_path / "out")).orderBy("id").collect()
    assert [row.id for row in rows] == list(range(sum(SIZES)))
    assert all(row.prediction == row.features and row.name == f"row {row.id}" for row in rows)


def test_a_stream_of_unknown_width_says_what_to_pass(tmp_path: Path, spark: Any) -> None:
    spark.range(1).selectExpr("array(1.0f) AS features").write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema("features array<float>").parquet(str(tmp_path / "in"))

    with pytest.raises(ConfigError, match="shapes="):
        identity().predict(stream, feature_cols="features")


@pytest.mark.parametrize("ingest", ["direct", "inline"])
def test_a_parquet_frame_is_scored_alike_both_ways(
    tmp_path: Path, spark: Any, partitioned: Callable[..., Any], ingest: str
) -> None:
    frame_of_ten_thousand(partitioned).write.parquet(str(tmp_path / "with space"))
    frame = spark.read.parquet(str(tmp_path / "with space"))

    scored = identity().predict(
        frame, batch_size=100, feature_cols="features", columns=Columns(ingest=ingest)
    )

    rows = scored.collect()
    assert sorted(row.id for row in rows) == list(range(sum(SIZES)))
    assert all(row.prediction == row.features and row.name == f"row {row.id}" for row in rows)


class Reshape(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x.reshape(-1, 3, 2), x.sum(1).double(), x.argmax(1)


def test_several_outputs_keep_their_shapes_and_dtypes(spark: Any) -> None:
    frame = spark.range(5).selectExpr("id", "transform(sequence(0, 5), i -> cast(id + i as float)) AS x")

    scored = Estimator.from_torch(model=Reshape()).predict(
        frame, feature_cols="x", output_cols=["grid", "total", "best"]
    )

    assert scored.dtypes[2:] == [("grid", "array<array<float>>"), ("total", "double"), ("best", "bigint")]
    for row in scored.collect():
        x = np.array(row.x)
        assert np.array(row.grid).tolist() == x.reshape(3, 2).tolist()
        assert (row.total, row.best) == (x.sum(), 5)


class Diary(nn.Module):
    """Notes when it is loaded, and the size of every batch, by process."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def note(self, **what: Any) -> None:
        with Path(self.folder, str(os.getpid())).open("a") as file:
            file.write(json.dumps(what) + "\n")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.note(loaded=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note(rows=len(x))
        return x


def test_the_model_is_loaded_once_per_process_and_batches_have_one_size(
    tmp_path: Path, partitioned: Callable[..., Any]
) -> None:
    frame = frame_of_ten_thousand(partitioned)
    scored = Estimator.from_torch(model=Diary(str(tmp_path))).predict(
        frame, batch_size=300, feature_cols="features", columns=Columns(shapes={"features": (2,)})
    )
    for note in tmp_path.iterdir():
        note.unlink()  # what the driver noted while it looked at the model's outputs

    assert scored.select("prediction").count() == sum(SIZES)
    scored.write.format("noop").mode("overwrite").save()

    sizes = []
    for note in tmp_path.iterdir():
        lines = [json.loads(line) for line in note.read_text().splitlines()]
        assert sum("loaded" in line for line in lines) <= 1
        sizes += [line["rows"] for line in lines if "rows" in line]
    assert sum(sizes) == sum(SIZES), "one pass"
    expected = [300] * sum(size // 300 for size in SIZES) + [size % 300 for size in SIZES if size % 300]
    assert sorted(sizes) == sorted(expected)


class Minus(nn.Module):
    def forward(self, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        return columns["user"] - columns["item"]


def test_inputs_by_name_keep_their_names_when_the_columns_come_in_another_order(spark: Any) -> None:
    frame = spark.range(4).selectExpr("cast(id as float) AS user", "10f AS item").coalesce(1)
    est = Estimator.from_torch(model=Minus(), inputs="dict")

    for names in (["user", "item"], ["item", "user"], ["user", "item"]):  # in one Python worker of Spark's
        scored = est.predict(frame, feature_cols=names).collect()
        assert [row.prediction for row in scored] == [-10, -9, -8, -7]


def test_a_column_that_is_there_already_is_not_overwritten(spark: Any) -> None:
    frame = spark.range(1).selectExpr("cast(id as float) AS x", "'kept' AS prediction")

    with pytest.raises(ConfigError, match="already has.*prediction"):
        identity().predict(frame, feature_cols="x")


def test_a_column_that_is_not_there_is_answered_with_the_nearest_name(spark: Any) -> None:
    frame = spark.range(1).selectExpr("cast(id as float) AS image")

    with pytest.raises(ConfigError, match="Did you mean 'image'"):
        identity().predict(frame, feature_cols="imag")


@pytest.mark.parametrize("name", ["_kindler_row", "_KINDLER_OUTPUTS"])
def test_a_column_with_a_name_of_ours_is_scored_and_stays(spark: Any, name: str) -> None:
    frame = spark.createDataFrame([([1.0, 2.0, 3.0, 4.0, 5.0, 6.0],)], f"{name} array<float>")

    [row] = Estimator.from_torch(model=Reshape()).predict(frame, feature_cols=name).collect()

    assert row[name] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert row.prediction_1 == 21.0


def test_outputs_may_have_a_name_of_ours(spark: Any) -> None:
    frame = spark.createDataFrame([([1.0],)], "features array<float>")

    [row] = identity().predict(frame, feature_cols="features", output_cols="_kindler_row").collect()

    assert row["_kindler_row"] == [1.0]


class Picky(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x == 7).any()):
            raise KeyError("seven")
        return x


def test_what_a_model_raises_in_a_task_is_one_short_error_with_its_place(
    partitioned: Callable[..., Any],
) -> None:
    frame = partitioned([[([1.0],)], [([7.0],)]], "features array<float>")
    scored = Estimator.from_torch(model=Picky()).predict(frame, feature_cols="features")

    with pytest.raises(Exception, match="KeyError: seven") as caught:
        scored.collect()

    lines = str(caught.value).splitlines()
    assert len(lines) < 10
    assert "raised in a task of Spark (partition 1)" in str(caught.value)
    assert any(line.startswith("  File") and "test_predict.py" in line for line in lines)
    assert not any("/pyspark/" in line or "/torch/" in line for line in lines)
