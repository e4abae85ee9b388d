"""Steps of the users' own, in replicas, whose loss is not finite."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gang import GangWorker, attach, run_ranks
from torch import nn

from kindler.frameworks.torch.lightning_replica import LightningReplica
from kindler.frameworks.torch.step_replica import StepReplica
from kindler.train.loss_guard import LossGuard
from tests.torch.test_step_losses import ROWS, Manual, Module, _data, rate
from tests.unit.with_torch.rows import Rows

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("inherits_lightning", "no_workers_left")]


class Pair(nn.Module):
    """Two networks, and a buffer that counts steps."""

    made: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.second = nn.Linear(3, 1)
        self.average = nn.Linear(3, 1).requires_grad_(False)
        self.register_buffer("made", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x)


def play(run: Any, batch: Any) -> dict[str, Any]:
    """The first network has moved long before the second one's loss turns out to be bad."""
    model, x = run.model, batch["x"]
    first = (model.first(x.nan_to_num(posinf=0.0)).squeeze(1) - batch["y"]).square().mean()
    run.minimize(first, "first")
    second = (model.second(x).squeeze(1) - batch["y"]).square().mean()
    run.backward(second, "second")
    model.made += 1
    if int(model.made) % 2 == 0:  # gradients are added up over two steps
        run.update("second")
    with torch.no_grad():
        model.average.weight.lerp_(model.second.weight, 0.3)
    return {"first": first, "second": second}


def _spec() -> Any:
    return StepReplica.make_spec(
        model=Pair,
        optimizer={
            "first": lambda model: torch.optim.Adam(model.first.parameters(), lr=0.05),
            "second": lambda model: torch.optim.SGD(model.second.parameters(), lr=0.05, momentum=0.9),
        },
        scheduler={"first": rate},
        scheduler_step="step",
        clip_norm=1.0,
        train_step=play,
    )


def _stepped(worker: GangWorker, counts: Sequence[int], steps: Sequence[int], nan_loss: Any) -> Any:
    """Steps; in one that is negative, the last row has a value that no loss can use."""
    told: list[str] = []
    guard = LossGuard(nan_loss, rank=worker.rank, tell=told.append)
    names = {"feature_names": ("x",), "label_names": ("y",)}
    replica = StepReplica(_spec(), device="cpu", rank=worker.rank, **names)
    replica.watch_losses(guard)
    sync = attach(replica, worker)
    replica.begin_epoch(1)
    start = sum(counts[: worker.rank])
    part = slice(start, start + counts[worker.rank])
    for step in steps:
        x, y = _data(abs(step))
        if step < 0:
            x[-1, 0] = np.inf
        sync.step(replica, Rows((x[part],), (y[part],), counts[worker.rank], ROWS))
    state = [value.numpy() for value in replica.model.state_dict().values()]
    grads = [p.grad.numpy() for p in replica.model.parameters() if p.grad is not None]
    moments = [v.numpy() for s in replica.optimizers.state.values() for v in s.values() if v is not None]
    figures = replica.merge_tallies(worker.all_gather(replica.take_tallies()))
    rates = replica.rates()
    sync.close()
    return [*state, *grads, *moments], figures, rates, replica.step, guard.skipped, told


@pytest.mark.parametrize("counts", [(8,), (4, 4), (8, 0)])
def test_a_step_that_is_left_out_is_undone_with_all_its_optimizers_on_all_workers(
    counts: Sequence[int],
) -> None:
    found = run_ranks(len(counts), _stepped, counts, [1, -2, 3, 4, -5], "skip")
    wanted = run_ranks(len(counts), _stepped, counts, [1, 3, 4], "raise")

    for (arrays, figures, rates, steps, skipped, _), other in zip(found, wanted, strict=True):
        for array, reference in zip(arrays, other[0], strict=True):
            np.testing.assert_array_equal(array, reference)
        assert figures == other[1]
        assert rates == other[2]
        assert rates[0] == pytest.approx(0.05 * 0.7**3)
        assert (steps, skipped, other[3]) == (5, 2, 3)
    teller = len([count for count in counts if count]) - 1
    assert [len(told) for *_, told in found] == [int(rank == teller) for rank in range(len(counts))]
    assert f"the loss is inf in step 2 on worker {teller}" in found[teller][-1][0]


def test_gradients_that_are_not_finite_leave_a_step_out_whoever_computed_them() -> None:
    def raw(run: Any, batch: Any) -> torch.Tensor:
        """A loss of 0 whose gradient has no value."""
        loss = run.model(batch["x"] * 0).abs().sqrt().mean()
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss.detach()

    def kept(run: Any, batch: Any) -> dict[str, float]:
        run.backward(run.model(batch["x"] * 0).abs().sqrt().mean())
        return {}

    for step in (raw, kept):
        guard = LossGuard("skip", rank=0, tell=print)
        spec = StepReplica.make_spec(
            model=functools.partial(nn.Linear, 3, 1, bias=False), optimizer=torch.optim.SGD, train_step=step
        )
        replica = StepReplica(spec, device="cpu", feature_names=("x",))
        replica.watch_losses(guard)
        before = replica.model.weight.detach().clone()
        x, _ = _data(0)
        replica.train_step(Rows((x,), (), ROWS, ROWS))
        assert guard.skipped == 1
        assert replica.model.weight.grad is None
        assert torch.equal(replica.model.weight, before)


@pytest.mark.parametrize("module", [Module, Manual])
def test_a_module_forgets_a_step_that_is_left_out_with_what_it_logged(module: Any) -> None:
    results = []
    for steps, nan_loss in (([1, -2, 3], "skip"), ([1, 3], "raise")):
        guard = LossGuard(nan_loss, rank=0, tell=print)
        replica = LightningReplica(LightningReplica.make_spec(model=module()), device="cpu")
        replica.watch_losses(guard)
        replica.begin_epoch(1)
        for step in steps:
            x, y = _data(abs(step))
            if step < 0:
                x[-1, 0] = np.nan
            replica.train_step(Rows((x,), (y,), ROWS, ROWS))
        results.append(
            (replica.read(), replica.merge_tallies([replica.take_tallies()]), replica.learning_rate())
        )
        assert guard.skipped == len(steps) - 2

    (found, figures, now), (wanted, others, then) = results
    for array, reference in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(array, reference)
    assert figures == others
    assert {"error", "largest", "loss"} <= figures.keys()
    assert now == then == pytest.approx(0.05 * 0.7**2)
