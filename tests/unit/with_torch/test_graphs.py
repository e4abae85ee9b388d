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

from kindler.frameworks.torch import private
from kindler.frameworks.torch.device import backward_on, held
from kindler.frameworks.torch.graphs import FastestWay, moves_in_graph, numbers_in_python, why_not
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


@pytest.mark.parametrize(
    ("optimizer", "options", "exchanged", "moves"),
    [
        (torch.optim.AdamW, {}, False, True),
        (torch.optim.SGD, {}, False, True),
        (torch.optim.Adagrad, {}, False, False),
        (torch.optim.AdamW, {}, True, False),
        (torch.optim.AdamW, {"precision": "fp16"}, False, False),
        (torch.optim.AdamW, {"scheduler": lambda optimizer: None, "scheduler_step": "step"}, False, False),
    ],
)
def test_the_optimizer_is_in_the_graph_where_its_step_needs_no_python(
    optimizer: Any, options: dict[str, Any], exchanged: bool, moves: bool
) -> None:
    model = nn.Linear(4, 1)
    spec = TorchSpec(model=model, optimizer=optimizer, loss=nn.MSELoss(), **options)

    assert moves_in_graph(spec, optimizer(model.parameters()), exchanged=exchanged) is moves


def test_what_may_meet_other_workers_within_a_step_is_not_recorded() -> None:
    spec = TorchSpec(model=nn.Linear(4, 1), optimizer=torch.optim.Adam, loss=nn.MSELoss())
    found = functools.partial(why_not, spec, GPU)

    assert found(gathers=False, divided=False) is None
    assert found(gathers=True, divided=False) == "the loss is your own and may gather rows of other workers"
    assert found(gathers=False, divided=True) == "strategy='fsdp' gathers parameters in each step"


def tried(ways: FastestWay, clock: list[float], costs: dict[str, float], steps: int = 200) -> list[str]:
    """The way of each step, every fifth of which has fewer rows and takes long."""
    went = []
    for number in range(steps):
        with ways.timed(8 if number % 5 == 4 else 32):
            went.append(str(ways.now))
            clock[0] += 100.0 if number % 5 == 4 else costs[str(ways.now)]
    return went


@pytest.mark.parametrize("fastest", ["eager", "graphs", "torch.compile", "graphs of torch.compile"])
def test_the_way_whose_steps_took_least_stays(fastest: str) -> None:
    clock, costs = [0.0], {"eager": 5.0, "graphs": 4.0, "torch.compile": 3.0, "graphs of torch.compile": 2.0}
    ways = FastestWay(records=True, clock=lambda: clock[0], wait=lambda: None)

    went = tried(ways, clock, {**costs, fastest: 1.0})

    assert ways.over
    assert str(ways.now) == fastest
    assert list(dict.fromkeys(went[:80])) == list(costs)


def test_what_cannot_be_recorded_or_compiled_is_not_chosen() -> None:
    clock, costs = [0.0], {"eager": 5.0, "graphs": 1.0, "torch.compile": 1.0}
    ways = FastestWay(records=True, clock=lambda: clock[0], wait=lambda: None)
    while str(ways.now) == "eager":
        tried(ways, clock, costs, steps=1)
    ways.give_up(recorded=True)
    assert str(ways.now) == "torch.compile"
    ways.give_up(compiled=True)

    assert ways.over
    assert str(ways.now) == "eager"


def test_a_step_whose_backward_cannot_be_compiled_is_made_and_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Uncompiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise private.compile_error()("no")

    model = nn.Linear(4, 1)
    monkeypatch.setattr(torch, "compile", lambda model: lambda x: Uncompiled.apply(model(x)))
    replica = TorchReplica(TorchSpec(model=model, optimizer=torch.optim.SGD, loss=nn.MSELoss()), device="cpu")
    replica._ways = ways = FastestWay(records=False, wait=lambda: None)

    for _ in range(20):
        replica.train_step(batch(X, Y))

    assert ways.over
    assert str(ways.now) == "eager"
    assert replica.step == 20
    assert replica.merge_tallies([replica.take_tallies()])["num_samples"] == 20 * len(X)


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
