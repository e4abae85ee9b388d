"""LightningModules on a DataFrame. By themselves: workers import what the module of a test imports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kindler import Estimator
from tests.whole import whole_only

# Here and not in the test: importing it sets variables of the process.
lightning: Any = pytest.importorskip("lightning")

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("no_workers_left"), whole_only]

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)


def test_a_lightning_module_is_trained_and_scored_on_a_frame(spark: Any) -> None:
    class Regression(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return F.mse_loss(self.layer(x).squeeze(1), y)

        def predict_step(self, batch: Any) -> Any:
            return self.layer(batch).squeeze(1)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.2)

    rows = [(i, x.tolist(), float(x.sum())) for i, x in enumerate(X)]
    frame = spark.createDataFrame(rows, "id long, x array<float>, y float").repartition(3)
    est = Estimator.from_lightning(Regression(), workers=2)
    history = est.fit(frame, epochs=8, batch_size=8, feature_cols="x", label_cols="y", verbose=0)
    # One task: each Python worker of Spark imports Lightning, which takes it nine seconds.
    scored = est.predict(frame.drop("y").coalesce(1), verbose=0).orderBy("id").toPandas()

    assert history["loss"][-1] < 0.05
    with torch.no_grad():
        expected = est.get_model().layer(torch.from_numpy(X)).squeeze(1)
    np.testing.assert_allclose(scored["prediction"], expected, atol=1e-5)
