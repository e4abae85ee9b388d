"""Steps of replicas whose loss is not finite."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gang import GangWorker, attach, run_ranks
from torch import nn

from kindler.frameworks.torch.replica import TorchReplica, TorchSpec
from kindler.train.loss_guard import LossGuard
from tests.torch.test_on_nan import ROWS, _data
from tests.unit.with_torch.rows import Rows

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def _spec() -> TorchSpec:
    return TorchSpec(
        model=_model,
        optimizer=functools.partial(torch.optim.Adam, lr=0.05),
        loss=nn.MSELoss(),
        scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        scheduler_step="step",
        accumulation_steps=2,
    )


def _skipping(worker: GangWorker, counts: Sequence[int], steps: Sequence[int]) -> tuple[Any, ...]:
    """Steps, of which one that is negative has a value on the second rank that no model can use."""
    told: list[str] = []
    guard = LossGuard("skip", rank=worker.rank, tell=told.append)
    replica = TorchReplica(_spec(), device="cpu", rank=worker.rank)
    replica.watch_losses(guard)
    sync = attach(replica, worker)
    replica.begin_epoch(1)
    start = sum(counts[: worker.rank])
    for step in steps:
        x, y = _data(abs(step))
        if step < 0:
            x[-1, 0] = np.inf
        part = slice(start, start + counts[worker.rank])
        sync.step(replica, Rows((x[part],), (y[part],), counts[worker.rank], ROWS))
    state = [value.numpy() for value in replica.model.state_dict().values()]
    moments = [v for s in replica.optimizer.state.values() for v in s.values()]
    loss = replica.merge_tallies(worker.all_gather(replica.take_tallies()))["loss"]
    rate, step_count = replica.learning_rate(), replica.step
    sync.close()
    return state, [float(v.sum()) for v in moments], loss, rate, step_count, guard.skipped, told


@pytest.mark.parametrize(("size", "counts"), [(1, (8,)), (2, (4, 4))])
def test_a_step_that_is_left_out_changes_nothing_on_any_worker(size: int, counts: Sequence[int]) -> None:
    found = run_ranks(size, _skipping, counts, [1, -2, 3])
    wanted = run_ranks(size, _skipping, counts, [1, 3])

    for (state, moments, loss, rate, steps, skipped, _), other in zip(found, wanted, strict=True):
        for array, reference in zip(state, other[0], strict=True):
            np.testing.assert_array_equal(array, reference)
        assert (moments, rate) == (other[1], other[3])
        assert (steps, skipped, other[4]) == (3, 1, 2)
        assert np.isfinite(loss)
    assert [told for *_, told in found][:-1] == [[]] * (size - 1)  # only the worker that has such a row tells
    assert "in step 2 on worker" in found[-1][-1][0]
