"""Slices of the optimizer on Spark's tasks: the result and the checkpoints are those of all-reduce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Columns, Estimator, Optimization

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("no_workers_left")]


def _estimator() -> Estimator:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 9), nn.Tanh(), nn.Linear(9, 1))
    return Estimator.from_torch(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.05),
        loss=nn.MSELoss(),
        optimization=Optimization(clip_norm=1.0),
        workers=3,
        engine="spark",
    )


def test_three_tasks_divide_the_optimizer_and_resume_without_dividing_it(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(60, numPartitions=2).selectExpr(
        "float(id) / 60 AS features", "float(id % 7) AS label"
    )
    options: dict[str, Any] = {
        "batch_size": 20,
        "columns": Columns(shapes={"features": (1,), "label": (1,)}),
        "verbose": 0,
    }
    straight = _estimator()
    straight.fit(frame, epochs=3, **options)
    for strategy in ("zero1", "fsdp"):
        divided, folder = _estimator(), tmp_path / strategy
        divided.fit(frame, epochs=2, strategy=strategy, checkpoint=folder, **options)
        divided.fit(frame, epochs=1, checkpoint=folder, **options)

        for mine, its in zip(
            divided.get_model().parameters(), straight.get_model().parameters(), strict=True
        ):
            np.testing.assert_allclose(mine.detach(), its.detach(), rtol=0, atol=1e-5)
