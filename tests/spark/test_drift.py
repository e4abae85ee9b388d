"""Statistics of a DataFrame's rows, and what differs between two of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from kindler import Columns, Estimator
from kindler.errors import ConfigError

pytestmark = pytest.mark.spark
DRAW = np.random.default_rng(5)


def table(age: float) -> pd.DataFrame:
    return pd.DataFrame({"age": DRAW.normal(age, 9, 3000), "plan": DRAW.integers(0, 3, 3000), "y": 0.5})


def test_a_frame_is_compared_with_the_one_that_a_model_was_trained_on(spark: Any) -> None:
    estimator = Estimator.from_torch(
        model=torch.nn.Linear(2, 1), optimizer=torch.optim.SGD, loss=torch.nn.MSELoss(), workers=2
    )
    columns = Columns(stack_features=True)
    estimator.fit(
        spark.createDataFrame(table(0)), 1, feature_cols=["age", "plan"], label_cols="y", columns=columns
    )
    known = estimator.statistics
    assert known is not None
    assert (known["columns"]["age"]["rows"], known["columns"]["age"]["std"]) == (
        3000,
        pytest.approx(9, abs=1),
    )

    older = spark.createDataFrame(table(9)).selectExpr("age", "if(age < 0, null, plan) plan", "'a' unused")
    told = estimator.drift(older.repartition(3))

    assert estimator.drift(spark.createDataFrame(table(0)))["alarm"] is False
    assert told["columns"]["age"]["alarm"]
    assert told["columns"]["plan"]["missing"] == [0.0, pytest.approx(0.16, abs=0.04)]
    assert (told["rows"], told["unknown"]) == (3000, ["y"])
    stream = spark.readStream.format("rate").load()
    with pytest.raises(ConfigError, match="received a streaming DataFrame"):
        estimator.drift(stream)
