"""Models as functions of SQL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from kindler import Columns, Estimator, Prepare
from kindler.errors import ConfigError, UntrainedWarning

pytestmark = pytest.mark.spark


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": (x * self.weight).sum(1), "scaled": x * self.weight}


@pytest.fixture(scope="module")
def points(spark: Any) -> Any:
    x = np.random.default_rng(0).normal(size=(40, 2)).astype("float32")
    frame = spark.createDataFrame(pd.DataFrame({"id": range(40), "a": x[:, 0], "b": x[:, 1], "v": list(x)}))
    frame.createOrReplaceTempView("points")
    return x


def test_a_model_of_a_vector_scores_in_sql_and_in_frames_as_predict_does(spark: Any, points: Any) -> None:
    est = Estimator.from_torch(model=nn.Linear(2, 1))
    score = est.register_udf(
        spark, "score_vector", feature_cols="v", columns=Columns(shapes={"v": (2,)}), batch_size=7
    )

    rows = spark.sql("SELECT id, score_vector(v) AS s FROM points ORDER BY id").collect()
    again = spark.table("points").select("id", score("v").alias("s")).orderBy("id").collect()

    expected = est.predict(points)[:, 0]
    np.testing.assert_allclose([row.s[0] for row in rows], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([row.s[0] for row in again], expected, rtol=1e-5, atol=1e-6)


def test_several_columns_are_arguments_in_their_order_and_several_outputs_a_struct(
    spark: Any, points: Any
) -> None:
    est = Estimator.from_torch(model=Two())
    frame = spark.table("points")
    expected = (
        est.predict(frame, feature_cols=["a", "b"], columns=Columns(stack_features=True))
        .orderBy("id")
        .collect()
    )
    trained = Estimator.from_torch(
        model=Two(), optimizer=torch.optim.SGD, loss=lambda out, y: out["sum"].mean() * 0
    )
    trained.fit(
        frame, feature_cols=["a", "b"], label_cols="id", columns=Columns(stack_features=True), verbose=0
    )
    trained.register_udf(spark, "two")

    rows = spark.sql("SELECT two(a, b).sum AS s, two(a, b).scaled AS v FROM points ORDER BY id").collect()

    np.testing.assert_allclose([row.s for row in rows], [row["sum"] for row in expected], rtol=1e-5)
    np.testing.assert_allclose([row.v for row in rows], [row.scaled for row in expected], rtol=1e-5)
    with pytest.raises(Exception, match="this function takes 2 columns, a, b; it was called with 1"):
        spark.sql("SELECT two(a) FROM points").collect()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"name": "not a name"}, "not the name of a function"),
        ({"name": "score"}, r"which columns does the model take\?"),
        ({"name": "score", "feature_cols": "v"}, "the width of the model's columns"),
    ],
)
def test_what_cannot_be_a_function_is_refused(spark: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Estimator.from_torch(model=nn.Linear(2, 1)).register_udf(spark, **options)


def test_an_estimator_with_a_transform_is_refused(spark: Any) -> None:
    est = Estimator.from_torch(model=nn.Linear(2, 1), prepare=Prepare(transform=lambda row: row))
    with pytest.raises(ConfigError, match="has a transform|what a transform returns"):
        est.register_udf(spark, "score", feature_cols="v", columns=Columns(shapes={"v": (2,)}))


def test_a_creator_that_nobody_trained_warns_and_has_the_weights_of_the_seed_in_every_task(
    spark: Any, points: Any
) -> None:
    est = Estimator.from_torch(model=lambda config: nn.Linear(2, 1), seed=3)
    with pytest.warns(UntrainedWarning, match="random numbers, drawn with seed=3"):
        est.register_udf(spark, "untrained", feature_cols="v", columns=Columns(shapes={"v": (2,)}))
    with pytest.warns(UntrainedWarning, match="random numbers, drawn with seed=3"):
        expected = est.predict(points)[:, 0]

    frame = spark.table("points").repartition(3).selectExpr("id", "untrained(v) AS s")

    rows = sorted(frame.collect())
    np.testing.assert_allclose([row.s[0] for row in rows], expected, rtol=1e-5, atol=1e-6)
