"""Frames as they come: odd names, validation data of another kind, and frames that cannot be computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import functions as F
from torch import nn

from kindler import Columns, Estimator, XShards
from kindler.errors import ConfigError, DataError

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("no_workers_left")]

X = np.arange(16, dtype=np.float32).reshape(8, 2) / 16
Y = X.sum(1)


def regression() -> Estimator:
    model = nn.Linear(2, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    return Estimator.from_torch(model=model, optimizer=sgd, loss=nn.MSELoss(), workers=2)


def made(spark: Any, features: str = "array<float>", label: str = "float") -> Any:
    rows = spark.createDataFrame(
        [(x.tolist(), float(y)) for x, y in zip(X, Y, strict=True)], "f array<double>, l double"
    )
    return rows.select(F.col("f").cast(features).alias("features"), F.col("l").cast(label).alias("label"))


def vectors(spark: Any) -> Any:
    parts = made(spark).selectExpr("features[0] AS a", "features[1] AS b", "label")
    return VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(parts)


ODD = ["a`b", "a.b", "a b", "ä#1", "", "`", "x``.y", "_metadata"]


@pytest.mark.parametrize("ingest", ["inline", "auto"])
def test_a_column_may_have_any_name(tmp_path: Path, spark: Any, ingest: str) -> None:
    columns = {name: np.full(4, i, np.float32) for i, name in enumerate(ODD)}
    frame = spark.createDataFrame(pa.table({f"c{i}": c for i, c in enumerate(columns.values())})).toDF(*ODD)
    if ingest == "auto":
        frame.drop(F.col("``")).write.parquet(str(tmp_path / "t"))
        frame = spark.read.parquet(str(tmp_path / "t"))
    names = frame.columns
    model = nn.Linear(len(names), 1)
    est = Estimator.from_torch(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.0), loss=nn.MSELoss(), workers=2
    )
    options: dict[str, Any] = {
        "feature_cols": names,
        "columns": Columns(stack_features=True, ingest=ingest),
    }

    est.fit(frame, label_cols="a`b", verbose=0, **options)
    assert est.evaluate(frame, label_cols="a`b", verbose=0, **options)["num_samples"] == 4
    both = Estimator.from_torch(model=nn.Identity()).predict(frame, output_cols="p`.q", **options)

    assert [row["p`.q"] for row in both.collect()] == [[float(ODD.index(name)) for name in names]] * 4
    assert list(XShards.from_spark_df(frame).head(1).columns) == names


def test_outputs_of_any_name_are_appended(spark: Any) -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, -x

    frame = spark.range(2).selectExpr("cast(id AS float) AS `a``.b`")

    rows = (
        Estimator.from_torch(model=Two())
        .predict(frame, feature_cols="a`.b", output_cols=["p`.q", ""])
        .collect()
    )

    assert [tuple(row) for row in rows] == [(0.0, 0.0, 0.0), (1.0, 1.0, -1.0)]


def test_an_output_does_not_replace_a_column_whose_name_differs_in_case(spark: Any) -> None:
    frame = spark.range(2).selectExpr("cast(id AS float) AS x", "7 AS Prediction")

    with pytest.raises(ConfigError, match=r"already has \['prediction'\]"):
        Estimator.from_torch(model=nn.Identity()).predict(frame, feature_cols="x")


@pytest.mark.parametrize("other", ["x", "X"])
def test_a_name_that_two_columns_have_is_refused(spark: Any, other: str) -> None:
    frame = spark.range(2).selectExpr("cast(id AS float) AS x", f"2f AS {other}", "1f AS label")

    with pytest.raises(ConfigError, match=r"column 'x' is ambiguous; the DataFrame has \['x', '.'\]"):
        regression().fit(frame, feature_cols="x", label_cols="label")
    with pytest.raises(ConfigError, match="column 'x' is ambiguous"):
        Estimator.from_torch(model=nn.Identity()).predict(frame, feature_cols="x")


def test_training_and_validation_frames_may_have_different_types(spark: Any) -> None:
    def losses(data: Any, validation: Any) -> list[float]:
        rows = regression().fit(
            data,
            batch_size=8,
            epochs=2,
            validation_data=validation,
            verbose=0,
            columns=Columns(ingest="inline"),
        )
        return [*rows["loss"], *rows["val_loss"]]

    expected = losses(made(spark), made(spark))

    for data, validation in (
        (made(spark), vectors(spark)),
        (vectors(spark), made(spark, "array<double>", "double")),
    ):
        assert losses(data, validation) == pytest.approx(expected, abs=1e-6)


def as_tuple(folder: Path) -> Any:
    return X, Y


def as_pandas(folder: Path) -> Any:
    return pd.DataFrame({"inputs": list(X), "target": Y})


def as_path(folder: Path) -> Any:
    pq.write_table(pa.table({"inputs": list(X), "target": Y}), folder / "v.parquet")
    return str(folder / "v.parquet")


@pytest.mark.parametrize("form", [as_tuple, as_pandas, as_path])
def test_validation_data_of_another_kind_is_found_by_the_same_names(
    tmp_path: Path, spark: Any, form: Any
) -> None:
    frame = made(spark).toDF("inputs", "target")
    est = regression()

    rows = est.fit(
        frame,
        batch_size=8,
        feature_cols="inputs",
        label_cols="target",
        validation_data=form(tmp_path),
        verbose=0,
    )

    assert rows["val_loss"][0] == pytest.approx(est.evaluate(frame, verbose=0)["loss"], abs=1e-6)
    assert est.evaluate(form(tmp_path), verbose=0)["loss"] == pytest.approx(rows["val_loss"][0], abs=1e-6)


def test_validation_data_without_the_columns_says_which_it_lacks(spark: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^validation_data: feature_cols: there is no column 'inputs'.*\['a', 'b'\]"
    ):
        regression().fit(
            made(spark).toDF("inputs", "target"),
            feature_cols="inputs",
            label_cols="target",
            validation_data=pd.DataFrame({"a": [1.0], "b": [1.0]}),
        )


def raises(number: int) -> list[float]:
    raise LookupError(f"no entry for {number}")


def with_null(spark: Any) -> Any:
    parts = spark.range(8).selectExpr("if(id = 0, null, cast(id AS double)) AS a", "1f AS label")
    return VectorAssembler(inputCols=["a"], outputCol="features").transform(parts)


def with_udf(spark: Any) -> Any:
    udf = F.udf(raises, "array<float>")
    return spark.range(1, 5).select(udf("id").alias("features"), F.lit(1.0).cast("float").alias("label"))


def with_sql(spark: Any) -> Any:
    return spark.range(4).selectExpr("array(cast('a' || id AS float)) AS features", "1f AS label")


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (with_null, r"^column 'features': Spark cannot compute it: Encountered null while assembling[^\n]*$"),
        (with_udf, r"^LookupError: no entry for \d\n\nraised by code of the frame.*in raises"),
        (with_sql, r"^Spark cannot compute the frame: \[CAST_INVALID_INPUT\] The value 'a\d'[^\n]*$"),
    ],
)
@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
def test_what_fails_inside_a_frame_is_said_first_and_without_a_jvm_stack(
    spark: Any, verb: str, frame: Any, words: str
) -> None:
    with pytest.raises(DataError, match=f"(?s){words}") as caught:
        getattr(regression(), verb)(frame(spark), feature_cols="features", verbose=0)

    assert "org.apache.spark" not in str(caught.value)
    assert "/pyspark/" not in str(caught.value)
    assert caught.value.__suppress_context__
