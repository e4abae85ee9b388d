"""Training of a stored estimator on Spark, as a worker of the runtime does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from kindler import Estimator, Store
from kindler.runtime import value_codec
from kindler.runtime.executor import Executor
from kindler.runtime.messages import Task

pytestmark = [pytest.mark.spark, pytest.mark.torch]


def test_fit_of_a_stored_estimator_runs_on_spark_and_publishes_a_version(spark: Any, tmp_path: Path) -> None:
    om = Store(tmp_path / "store")
    x = np.linspace(0, 1, 40)
    om.datasets.put(pd.DataFrame({"x": x, "y": 3 * x}), "rows")
    om.models.put(Estimator.from_torch(model=torch.nn.Sequential(torch.nn.Linear(1, 1))), "line")

    options = {
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "stack_features": True,
        "epochs": 30,
        "batch_size": 8,
        "optimizer": "SGD",
        "lr": 0.5,
        "loss": "MSELoss",
        "engine": "spark",
        "workers": 1,
    }
    task = Task(
        id="t",
        shelf="models",
        bucket="default",
        name="line@1",
        verb="fit",
        buffers=value_codec.encode([["rows", None], options]),
    )
    version = Executor(str(tmp_path / "store")).run(task)

    assert (str(version), version.kind) == ("line@2", "estimator")
    trained = om.models.get("line")
    assert len(trained.history) == 30
    (layer,) = trained.get_model()
    assert layer.weight.item() == pytest.approx(3, abs=0.2)
    om.close()
