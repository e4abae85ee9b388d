"""Steps of users' own on a DataFrame: trained on barrier tasks, scored by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kindler
from kindler import Estimator

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("no_workers_left")]

ROWS = 40
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.generator, self.critic = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        made = self.generator(x)
        return {"made": made, "judged": {"score": self.critic(made).squeeze(1)}}


def play(run: Any, batch: Any) -> dict[str, Any]:
    real, model = batch["x"], run.model
    made = model.generator(real.flip(1))
    critic = (F.softplus(-model.critic(real)) + F.softplus(model.critic(made.detach()))).mean()
    run.minimize(critic, "critic")
    run.minimize(F.softplus(-model.critic(made)).mean(), "generator")
    return {"critic_loss": critic}


def part(name: str) -> Any:
    return lambda model: torch.optim.SGD(getattr(model, name).parameters(), lr=0.1)


def test_a_gan_is_trained_and_scored_on_a_frame(spark: Any) -> None:
    rows = [(i, x.tolist(), float(x.sum())) for i, x in enumerate(X)]
    frame = spark.createDataFrame(rows, "id long, x array<float>, y float").repartition(3)
    est = Estimator.from_torch(
        model=Gan,
        optimizer={"generator": part("generator"), "critic": part("critic")},
        train_step=play,
        workers=2,
    )
    history = est.fit(frame, epochs=2, batch_size=8, feature_cols="x", verbose=0)
    scored = est.predict(frame, verbose=0).orderBy("id").toPandas()

    assert history["num_samples"] == [ROWS, ROWS]
    with torch.no_grad():
        expected = est.get_model()(torch.from_numpy(X))
    np.testing.assert_allclose(np.stack(scored["made"].tolist()), expected["made"], atol=1e-5)
    np.testing.assert_allclose(scored["judged_score"], expected["judged"]["score"], atol=1e-5)


def of_all(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Rows against one another, those of all workers."""
    outputs = F.normalize(kindler.all_gather(outputs), dim=1)
    return F.cross_entropy(outputs @ outputs.roll(1, 1).T, torch.arange(len(outputs)))


def test_a_contrastive_loss_of_three_workers_is_that_of_one(spark: Any) -> None:
    rows = [(x.tolist(), float(x.sum())) for x in np.concatenate([X, X + 1])]
    frame = spark.createDataFrame(rows, "x array<float>, y float").repartition(3).cache()

    def losses(workers: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        est = Estimator.from_torch(model=model, optimizer=optimizer, loss=of_all, workers=workers)
        history = est.fit(frame, epochs=2, batch_size=7, feature_cols="x", label_cols="y", verbose=0)
        return [*history["loss"], *model.weight.detach().flatten().tolist()]

    np.testing.assert_allclose(losses(3), losses(1), rtol=2e-5, atol=1e-6)
