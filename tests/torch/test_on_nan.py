"""Losses that are NaN or infinite: raised with step, worker and rows; warned of; left out on all workers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Columns, Estimator, RunSettings
from kindler.errors import ConfigError, NonFiniteLossError
from tests.unit.with_torch.rows import Array

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

ROWS = 8
FIT: dict[str, Any] = {"batch_size": 10, "shuffle": False, "columns": Columns(allow_nan=True), "verbose": 0}
SKIP = RunSettings(nan_loss="skip")


def _data(step: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(step)
    return rng.normal(size=(ROWS, 3)).astype(np.float32), rng.normal(size=ROWS).astype(np.float32)


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
    with pytest.raises(
        NonFiniteLossError, match=r"(?s)the loss is nan in step 3 on worker [01].*Row 23.*'x'"
    ) as raised:
        _estimator().fit(_with_a_bad_row(), **FIT)

    error = raised.value
    assert (error.step, isinstance(error, FloatingPointError)) == (3, True)
    assert error.rank in (0, 1)
    assert 23 in error.rows
    assert "nan_loss='skip'" in str(error)


def test_fit_warns_or_leaves_out_and_goes_on() -> None:
    with pytest.warns(RuntimeWarning, match="the loss is nan in step 3 .* Training continues with it"):
        history = _estimator(settings=RunSettings(nan_loss="warn")).fit(_with_a_bad_row(), **FIT)
    assert np.isnan(history[0]["loss"])

    skipping = _estimator(settings=SKIP)
    with pytest.warns(RuntimeWarning, match="the loss is nan in step 3 .* The step is skipped"):
        history = skipping.fit(_with_a_bad_row(), epochs=2, **FIT)
    assert history["skipped_steps"] == [1, 1]
    assert np.isfinite(history["loss"]).all()
    assert np.isfinite(skipping.get_model().weight.detach().numpy()).all()


def test_what_cannot_be_done_about_a_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nan_loss='ignore'\): must be 'raise', 'warn' or 'skip'"):
        RunSettings(nan_loss="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"needs strategy='allreduce'; received strategy='async'"):
        _estimator(settings=SKIP).fit(_data(0), strategy="async")
