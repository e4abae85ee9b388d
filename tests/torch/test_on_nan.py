"""Losses that are NaN or infinite: raised with step, worker and rows; warned of; left out on all workers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gang import GangWorker, attach, run_ranks
from rows import Array, Rows
from torch import nn

from kindler import Estimator
from kindler.errors import ConfigError, NonFiniteLossError
from kindler.frameworks.torch.replica import TorchReplica, TorchSpec
from kindler.train.loss_guard import LossGuard

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

ROWS = 8


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def _data(step: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(step)
    return rng.normal(size=(ROWS, 3)).astype(np.float32), rng.normal(size=ROWS).astype(np.float32)


def _spec() -> TorchSpec:
    return TorchSpec(
        model=_model,
        optimizer=functools.partial(torch.optim.Adam, lr=0.05),
        loss=nn.MSELoss(),
        scheduler_creator=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1),
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


def _estimator(**options: Any) -> Estimator:
    return Estimator.from_torch(
        model=functools.partial(nn.Linear, 3, 1),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        loss=nn.MSELoss(),
        workers=2,
        engine="local",
        **options,
    )


def _with_a_bad_row() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    x[23, 1] = np.nan
    return {"x": x, "y": rng.normal(size=40).astype(np.float32)}


def test_fit_raises_with_step_worker_and_rows() -> None:
    options: dict[str, Any] = {"batch_size": 10, "shuffle": False, "allow_nan": True, "verbose": 0}
    with pytest.raises(
        NonFiniteLossError, match=r"(?s)the loss is nan in step 3 on worker [01].*Row 23.*'x'"
    ) as raised:
        _estimator().fit(_with_a_bad_row(), **options)

    error = raised.value
    assert (error.step, isinstance(error, FloatingPointError)) == (3, True)
    assert error.rank in (0, 1)
    assert 23 in error.rows
    assert "on_nan='skip'" in str(error)


def test_fit_warns_or_leaves_out_and_goes_on() -> None:
    options: dict[str, Any] = {"batch_size": 10, "shuffle": False, "allow_nan": True, "verbose": 0}
    with pytest.warns(RuntimeWarning, match="the loss is nan in step 3 .* Training goes on with it"):
        history = _estimator().fit(_with_a_bad_row(), on_nan="warn", **options)
    assert np.isnan(history[0]["loss"])

    skipping = _estimator()
    with pytest.warns(RuntimeWarning, match="the loss is nan in step 3 .* The step is left out"):
        history = skipping.fit(_with_a_bad_row(), epochs=2, on_nan="skip", **options)
    assert history["skipped_steps"] == [1, 1]
    assert np.isfinite(history["loss"]).all()
    assert np.isfinite(skipping.get_model().weight.detach().numpy()).all()


def test_what_cannot_be_done_about_a_loss_is_refused() -> None:
    x, y = _data(0)
    with pytest.raises(ConfigError, match="on_nan must be 'raise', 'warn' or 'skip'; received 'ignore'"):
        _estimator().fit((x, y), on_nan="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"takes sync='allreduce'; received sync='async'"):
        _estimator().fit((x, y), on_nan="skip", sync="async")
