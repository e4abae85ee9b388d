"""Losses that are not finite, and Ctrl-C, in Keras's own training loop."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Any

import numpy as np
import problems
import pytest
from flavour import one_is_enough, two_unless_whole

from kindler import Columns, Estimator, RunSettings
from kindler.callbacks import DriverCallback
from kindler.errors import NonFiniteLossError

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

COLUMNS = {"feature_cols": "x", "label_cols": "y"}
ROWS: dict[str, Any] = {
    "batch_size": 10,
    "shuffle": False,
    "verbose": 0,
    "columns": Columns(allow_nan=True),
    **COLUMNS,
}


def _regressor(config: Mapping[str, Any]) -> Any:
    """With a loss that every backend computes for NaN, too."""
    keras = problems.library(config)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((problems.WIDTH,)), *layers])
    model.compile(optimizer=problems.optimizer(keras, "adam"), loss="mse")
    return model


def _estimator(flavour: str, settings: RunSettings | None = None) -> Estimator:
    return Estimator.from_keras(
        model=_regressor, config={"flavour": flavour}, workers=2, engine="local", settings=settings
    )


def _data() -> dict[str, np.ndarray]:
    return {name: problems.problem(40)[name] for name in ("x", "y")}


def _with_a_bad_row() -> dict[str, np.ndarray]:
    data = _data()
    data["x"][23, 1] = np.nan
    return data


def _weights(estimator: Estimator) -> list[Any]:
    return [np.asarray(array) for array in estimator.get_model().get_weights()]


@two_unless_whole
def test_a_step_that_is_left_out_changes_nothing_on_any_worker(flavour: str) -> None:
    skipping, straight = _estimator(flavour, RunSettings(nan_loss="skip")), _estimator(flavour)
    with pytest.warns(RuntimeWarning, match="the loss is nan in step 3 .* The step is skipped"):
        history = skipping.fit(_with_a_bad_row(), **ROWS)
    kept = np.r_[0:20, 30:40]
    straight.fit({name: array[kept] for name, array in _data().items()}, **ROWS)

    assert history[0]["skipped_steps"] == 1
    assert np.isfinite(history[0]["loss"])
    for first, second in zip(_weights(skipping), _weights(straight), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)


@one_is_enough
def test_fit_raises_with_step_worker_and_rows(flavour: str) -> None:
    with pytest.raises(NonFiniteLossError, match=r"the loss is nan in step 3 on worker [01]") as raised:
        _estimator(flavour).fit(_with_a_bad_row(), **ROWS)
    assert raised.value.step == 3
    assert all(20 <= row < 30 for row in raised.value.rows if isinstance(row, int))
    assert raised.value.rows


class Interrupt(DriverCallback):
    """Presses Ctrl-C while the workers train."""

    pressed = False

    def on_progress(self, fields: Mapping[str, Any]) -> None:
        if fields["step"] > 2 and not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)


@one_is_enough
def test_ctrl_c_keeps_the_newest_whole_step(flavour: str) -> None:
    data = {name: np.concatenate([array] * 50) for name, array in _data().items()}
    options: dict[str, Any] = {"batch_size": 4, "verbose": 0, **COLUMNS}
    interrupted, straight = _estimator(flavour), _estimator(flavour)
    with pytest.raises(KeyboardInterrupt, match="interrupted after step") as raised:
        interrupted.fit(data, epochs=100_000, callbacks=[Interrupt()], **options)

    step = int(re.search(r"step ([\d,]+)", str(raised.value))[1].replace(",", ""))  # type: ignore[index]
    assert sum(interrupted.history["steps"]) == step
    straight.fit(data, max_steps=step, **options)
    for first, second in zip(_weights(interrupted), _weights(straight), strict=True):
        np.testing.assert_array_equal(first, second)
    epoch = interrupted.history[-1]["epoch"]
    assert interrupted.fit(data, **options)[0]["epoch"] == epoch + 1
