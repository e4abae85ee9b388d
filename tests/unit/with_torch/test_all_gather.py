"""Replicas that gather the rows of all ranks, without estimators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gang import GangWorker, attach, run_ranks
from torch import nn

import kindler
from kindler.errors import ConfigError
from kindler.frameworks.torch.replica import TorchReplica, TorchSpec
from kindler.frameworks.torch.spec import StepSpec
from kindler.frameworks.torch.step_replica import StepReplica
from tests.torch.test_all_gather import info_nce, model, of_all
from tests.unit.with_torch.rows import Array, share

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

ROWS, STEPS = 16, 3
CUTS = [(16,), (5, 11), (16, 0), (0, 9, 7)]


def step(run: Any, batch: Any) -> torch.Tensor:
    outputs = run.model(batch["x"])
    first, second = run.all_gather(outputs[:, :3]), run.all_gather(outputs[:, 3:])
    return info_nce(first, second) + 0.1 * first.var() * run.all_gather(batch["y"]).mean()


def data(number: int) -> tuple[Array, Array]:
    random = np.random.default_rng(number)
    return random.normal(size=(ROWS, 4)).astype(np.float32), random.uniform(size=ROWS).astype(np.float32)


def trained(worker: GangWorker, cut: Sequence[int], own_step: bool) -> tuple[list[Array], float]:
    names = {"feature_names": ("x",), "label_names": ("y",), "rank": worker.rank}
    options: dict[str, Any] = {"model": model, "optimizer": adam}
    replica: TorchReplica = (
        StepReplica(StepSpec(**options, train_step=step), **names)
        if own_step
        else TorchReplica(TorchSpec(**options, loss=of_all), **names)
    )
    sync = attach(replica, worker)
    for number in range(STEPS):
        sync.step(replica, share(*data(number), cut, worker.rank))
    told = worker.all_gather(replica.take_tallies())
    return [p.detach().numpy() for p in replica.model.parameters()], replica.merge_tallies(told)["loss"]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


@pytest.fixture(scope="module")
def expected() -> tuple[list[Array], float]:
    """A plain loop over whole batches, as its user would write it."""
    by_hand, losses = model(), []
    optimizer = adam(by_hand)
    for number in range(STEPS):
        x, y = (torch.from_numpy(part) for part in data(number))
        optimizer.zero_grad()
        loss = of_all(by_hand(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [p.detach().numpy() for p in by_hand.parameters()], float(np.mean(losses))


@pytest.mark.parametrize("own_step", [False, True], ids=["loss", "step"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_rows_of_all_workers_train_as_in_one_process_however_they_are_cut(
    cut: tuple[int, ...], own_step: bool, expected: tuple[list[Array], float]
) -> None:
    for weights, loss in run_ranks(len(cut), trained, cut, own_step):
        assert loss == pytest.approx(expected[1], rel=1e-6)
        for found, its in zip(weights, expected[0], strict=True):
            np.testing.assert_allclose(found, its, rtol=1e-5, atol=5e-7)


def gathered_bits(worker: GangWorker) -> list[Any]:
    """What a step gathers of tensors of several kinds, of which this rank has as many rows as its number."""
    seen: list[Any] = []

    def gathers(run: Any, batch: Any) -> torch.Tensor:
        rows = torch.arange(len(batch["x"])) + 10 * run.rank
        tensors = [
            rows,
            rows > 10,
            rows.to(torch.bfloat16) / 3,
            -0.0 * rows.to(torch.float64),
            rows.to(torch.uint8),
        ]
        seen[:] = [run.all_gather(tensor) for tensor in tensors]
        return run.model(batch["x"]).mean()

    spec = StepSpec(model=model, optimizer=adam, train_step=gathers)
    replica = StepReplica(spec, feature_names=("x",), label_names=("y",), rank=worker.rank)
    sync = attach(replica, worker)
    sync.step(replica, share(*(part[:3] for part in data(0)), (0, 1, 2), worker.rank))
    return [(str(part.dtype), part.double().tolist(), torch.signbit(part.double()).tolist()) for part in seen]


def test_every_kind_of_number_arrives_as_it_is_on_all_workers() -> None:
    rows = torch.tensor([10, 20, 21])
    tensors = [
        rows,
        rows > 10,
        rows.to(torch.bfloat16) / 3,
        -0.0 * rows.to(torch.float64),
        rows.to(torch.uint8),
    ]
    wanted = [(str(t.dtype), t.double().tolist(), torch.signbit(t.double()).tolist()) for t in tensors]

    assert run_ranks(3, gathered_bits) == [wanted] * 3


def odd_one(worker: GangWorker) -> str:
    def gathers(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return kindler.all_gather(outputs[:, : 1 + worker.rank]).mean()

    replica = TorchReplica(TorchSpec(model=model, optimizer=adam, loss=gathers), rank=worker.rank)
    sync = attach(replica, worker)
    with pytest.raises(ConfigError) as told:
        sync.step(replica, share(*data(0), (8, 8), worker.rank))
    return str(told.value)


def test_workers_that_gather_different_things_are_told_so() -> None:
    for told in run_ranks(2, odd_one):
        assert "workers called all_gather with different tensors" in told
