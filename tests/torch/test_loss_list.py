"""A loss for each of several outputs: their weighted sum is that of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kindler import Estimator, Optimization
from kindler.errors import ConfigError
from tests.exact import assert_close

pytestmark = pytest.mark.torch

RANDOM = np.random.default_rng(2)
ROWS = 19
DATA = {
    "x": RANDOM.normal(size=(ROWS, 3)).astype(np.float32),
    "size": RANDOM.normal(size=ROWS).astype(np.float32),
    "kind": np.where(RANDOM.random(ROWS) < 0.3, -100, RANDOM.integers(0, 3, ROWS)),
}
WEIGHTS = {"size": 0.5, "kind": 2.0}


class Heads(nn.Module):
    def __init__(self, named: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.named = named
        self.size, self.kind = nn.Linear(3, 1), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        outputs = {"kind": self.kind(x), "size": self.size(x).squeeze(1)}
        return outputs if self.named else (outputs["size"], outputs["kind"])


def total(model: Heads, rows: Any = slice(None)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, size, kind = (torch.from_numpy(DATA[name])[rows] for name in ("x", "size", "kind"))
    first, second = F.mse_loss(model.size(x).squeeze(1), size), F.cross_entropy(model.kind(x), kind)
    return 0.5 * first + 2.0 * second, first, second


def by_hand() -> list[np.ndarray]:
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(3):
        for start, stop in ((0, 6), (6, 12), (12, 19)):
            optimizer.zero_grad()
            total(model, slice(start, stop))[0].backward()
            optimizer.step()
    return [p.detach().numpy().copy() for p in model.parameters()]


@pytest.mark.parametrize("named", [True, False])
def test_two_workers_sum_losses_of_their_own_divisors_as_one_process_does(named: bool) -> None:
    model = Heads(named)
    losses: Any = {"size": nn.MSELoss(), "kind": nn.CrossEntropyLoss()}
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3),
        loss=losses if named else list(losses.values()),
        optimization=Optimization(loss_weights=WEIGHTS if named else list(WEIGHTS.values())),
        workers=2,
    )
    columns = {"feature_cols": "x", "label_cols": ["size", "kind"]}
    est.fit(DATA, epochs=3, batch_size=7, shuffle=False, verbose=0, **columns)

    assert_close([p.detach().numpy() for p in est.get_model().parameters()], by_hand())
    judged = est.evaluate(DATA, verbose=0, **columns)
    with torch.no_grad():
        expected = [float(part) for part in total(est.get_model())]
    names = ("loss", "size_loss", "kind_loss") if named else ("loss", "loss_0", "loss_1")
    assert [judged[name] for name in names] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "optimization", "match"),
    [
        ([], {}, "it contains no loss"),
        ({"size": "mse"}, {}, r"loss\['size'\] must be a module"),
        ([nn.MSELoss(), nn.MSELoss()], {"loss_weights": [1.0]}, "a number for each of the 2"),
        ({"size": nn.MSELoss()}, {"loss_weights": {"kind": 1.0}}, "there is no loss of that name"),
        (nn.MSELoss(), {"loss_weights": [1.0]}, "belong to a list or dict of losses"),
        ([nn.MSELoss()], {"accumulation_steps": 2}, "with several losses it must be 1"),
        ([nn.Bilinear(1, 1, 1)], {}, "has its own parameters"),
    ],
)
def test_what_cannot_work_is_refused_when_the_estimator_is_made(
    loss: Any, optimization: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        Estimator.from_torch(model=Heads(), loss=loss, optimization=Optimization(**optimization))


def test_losses_that_outputs_or_labels_do_not_fit_are_refused() -> None:
    for losses, labels, match in (
        ({"size": nn.MSELoss(), "other": nn.MSELoss()}, ["size", "kind"], "no output of that name"),
        ([nn.MSELoss()], ["size", "kind"], "1 losses, and 2 label columns"),
    ):
        model = Heads()
        est = Estimator.from_torch(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=losses, workers=1
        )
        with pytest.raises(ConfigError, match=match):
            est.fit(DATA, batch_size=8, feature_cols="x", label_cols=labels, verbose=0)
