"""`all_gather`: a loss that compares rows with one another trains on several workers as in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kindler
from kindler import Estimator, Optimization
from kindler.errors import ConfigError

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]


def info_nce(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    scores = F.normalize(first, dim=1) @ F.normalize(second, dim=1).T / 0.3
    return F.cross_entropy(scores, torch.arange(len(scores)))


def of_all(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Both views of the rows of all workers, and a weight of each that has no gradient."""
    first, second = kindler.all_gather(outputs[:, :3]), kindler.all_gather(outputs[:, 3:])
    return info_nce(first, second) + 0.1 * first.var() * kindler.all_gather(target).mean()


def of_own(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return info_nce(outputs[:, :3], outputs[:, 3:])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))


def of_each_kind(rows: torch.Tensor) -> list[torch.Tensor]:
    return [rows, rows > 10, rows.to(torch.bfloat16) / 3, -0.0 * rows.double(), rows.to(torch.uint8)]


def test_it_is_the_tensor_itself_where_nobody_else_is() -> None:
    tensor = torch.ones(3, requires_grad=True)

    assert kindler.all_gather(tensor) is tensor


def fit(workers: int, strategy: str = "allreduce", **options: Any) -> tuple[list[float], Estimator]:
    trains = model()
    est = Estimator.from_torch(
        model=trains, optimizer=torch.optim.SGD(trains.parameters(), lr=0.1), workers=workers, **options
    )
    x = np.random.default_rng(9).normal(size=(61, 4)).astype(np.float32)
    rows = {"x": x, "y": np.abs(x[:, 0])}
    columns = {"feature_cols": "x", "label_cols": "y"}
    history = est.fit(rows, epochs=2, batch_size=8, strategy=strategy, verbose=0, **columns)
    return history["loss"], est


def test_a_fit_of_three_workers_has_the_losses_of_one_and_without_gathering_is_refused() -> None:
    alone, _ = fit(1, loss=of_all)
    several, _ = fit(3, loss=of_all)
    np.testing.assert_allclose(several, alone, rtol=2e-6)

    assert fit(1, loss=of_own)[0][0] > 0
    with pytest.raises(
        ConfigError, match=r"(?s)the loss of_own\(\) of \d+ rows together is .* not a mean.*all_gather"
    ):
        fit(2, loss=of_own)
    with pytest.raises(ConfigError, match=r"(?s)the passes of accumulation_steps.*accumulation_steps=1"):
        fit(1, loss=of_own, optimization=Optimization(accumulation_steps=2))
    either = r"(?s)(passes of accumulation_steps|workers that synchronize).*accumulation_steps=1"
    with pytest.raises(ConfigError, match=either):  # one worker finds the one, and one the other
        fit(2, loss=of_all, optimization=Optimization(accumulation_steps=2))
    with pytest.raises(
        ConfigError,
        match=r"(?s)all_gather needs workers that synchronize in every "
        r"step.*allreduce",
    ):
        fit(2, loss=of_all, strategy="local_sgd")
