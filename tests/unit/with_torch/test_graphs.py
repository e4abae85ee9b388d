"""What decides whether a step is run as a CUDA graph, and what of it stays when the device is another one."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler.frameworks.torch.device import backward_on, held
from kindler.frameworks.torch.graphs import numbers_in_python, why_not
from kindler.frameworks.torch.replica import TorchReplica, TorchSpec
from tests.unit.with_torch.rows import batch

pytestmark = pytest.mark.torch

X = np.random.default_rng(0).standard_normal((8, 4), dtype=np.float32)
Y = X.sum(axis=1, keepdims=True)
GPU = torch.device("cuda")


class Model(nn.Module):
    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.steps, self.seen, self.cache = 0, [0], torch.zeros(1)
        self.inner, self.change = nn.Linear(4, 1), change

    def forward(self, x: torch.Tensor) -> Any:
        self.change(self)
        return self.inner(x)


@pytest.mark.parametrize(
    ("change", "noticed"),
    [
        (lambda model: None, False),
        (lambda model: setattr(model, "cache", torch.ones(1)), False),
        (lambda model: setattr(model, "steps", model.steps + 1), True),
        (lambda model: model.seen.append(1), True),
        (lambda model: random.random(), True),
        (lambda model: np.random.random(), True),
        (lambda model: torch.rand(1), True),
    ],
)
def test_what_a_step_changes_in_python_is_noticed(change: Callable[[Any], Any], noticed: bool) -> None:
    model = Model(change)
    before = numbers_in_python(nn.Identity(), model)

    model(torch.zeros(2, 4))

    assert (numbers_in_python(nn.Identity(), model) != before) is noticed


def test_metrics_that_keep_a_state_are_a_reason_however_they_were_made() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    spec = TorchSpec(
        model=nn.Linear(4, 1),
        optimizer=torch.optim.Adam,
        loss=nn.MSELoss(),
        metrics={"mse": lambda config: torchmetrics.MeanSquaredError()},
    )
    replica = TorchReplica(spec, device="cpu")
    found = functools.partial(why_not, spec, replica.optimizer, GPU, several=False)

    assert found(stateful_metrics=False) is None
    assert replica.counter.has_states
    assert found(stateful_metrics=True) == "metrics of torchmetrics keep their state in Python"


def test_a_state_of_graphs_trains_on_a_cpu() -> None:
    spec = TorchSpec(model=nn.Linear(4, 1), optimizer=torch.optim.NAdam, loss=nn.MSELoss())
    recorded, again = TorchReplica(spec, device="cpu"), TorchReplica(spec, device="cpu")
    recorded.train_step(batch(X, Y))
    for group in recorded.optimizer.param_groups:
        group["capturable"] = True  # as on a GPU

    again.load_state(recorded.state())
    again.train_step(batch(X, Y))

    assert again.step == 2


def test_columns_that_a_gpu_cannot_pick_rows_of_stay_where_they_are() -> None:
    assert held([np.zeros((4, 2), np.uint16)], GPU, True) is None
    assert held([X], torch.device("cpu"), True) is None


@pytest.mark.parametrize(("kind", "handed_over"), [("cuda", False), ("cpu", True)])
def test_backward_on_a_gpu_is_not_handed_to_another_thread(kind: str, handed_over: bool) -> None:
    with backward_on(kind):
        assert torch._C._is_multithreading_enabled() is handed_over
    assert torch._C._is_multithreading_enabled()
