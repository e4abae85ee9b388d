"""`all_gather`: a loss that compares rows with one another trains on several workers as in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gang import GangWorker, attach, run_ranks
from rows import Array, share
from torch import nn
from torch.nn import functional as F

import kindler
from kindler import Estimator
from kindler.errors import ConfigError
from kindler.frameworks.torch.replica import TorchReplica, TorchSpec
from kindler.frameworks.torch.spec import StepSpec
from kindler.frameworks.torch.step_replica import StepReplica

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

ROWS, STEPS = 16, 3
CUTS = [(16,), (5, 11), (16, 0), (0, 9, 7)]


def info_nce(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    scores = F.normalize(first, dim=1) @ F.normalize(second, dim=1).T / 0.3
    return F.cross_entropy(scores, torch.arange(len(scores)))


def of_all(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Both views of the rows of all workers, and a weight of each that has no gradient."""
    first, second = kindler.all_gather(outputs[:, :3]), kindler.all_gather(outputs[:, 3:])
    return info_nce(first, second) + 0.1 * first.var() * kindler.all_gather(target).mean()


def of_own(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return info_nce(outputs[:, :3], outputs[:, 3:])


def step(run: Any, batch: Any) -> torch.Tensor:
    outputs = run.model(batch["x"])
    first, second = run.all_gather(outputs[:, :3]), run.all_gather(outputs[:, 3:])
    return info_nce(first, second) + 0.1 * first.var() * run.all_gather(batch["y"]).mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))


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


def of_each_kind(rows: torch.Tensor) -> list[torch.Tensor]:
    return [rows, rows > 10, rows.to(torch.bfloat16) / 3, -0.0 * rows.double(), rows.to(torch.uint8)]


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


def test_it_is_the_tensor_itself_where_nobody_else_is() -> None:
    tensor = torch.ones(3, requires_grad=True)

    assert kindler.all_gather(tensor) is tensor


def fit(workers: int, sync: str = "allreduce", **options: Any) -> tuple[list[float], Estimator]:
    trains = model()
    est = Estimator.from_torch(
        model=trains, optimizer=torch.optim.SGD(trains.parameters(), lr=0.1), workers=workers, **options
    )
    x = np.random.default_rng(9).normal(size=(61, 4)).astype(np.float32)
    rows = {"x": x, "y": np.abs(x[:, 0])}
    columns = {"feature_cols": "x", "label_cols": "y"}
    history = est.fit(rows, epochs=2, batch_size=8, sync=sync, verbose=0, **columns)
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
        fit(1, loss=of_own, accumulation_steps=2)
    either = r"(?s)(passes of accumulation_steps|all_gather needs workers that meet).*accumulation_steps=1"
    with pytest.raises(ConfigError, match=either):  # one worker finds the one, and one the other
        fit(2, loss=of_all, accumulation_steps=2)
    with pytest.raises(ConfigError, match=r"(?s)all_gather needs workers that meet in every step.*allreduce"):
        fit(2, loss=of_all, sync="rounds")
