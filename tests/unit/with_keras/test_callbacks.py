"""Figures that callbacks of Keras see, without a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import problems
import pytest
from flavour import KERAS, one_is_enough

from kindler.frameworks.keras.callbacks import make_hooks

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]


class _Recorder:
    """Follows a loop as a run does, and keeps what it is told at the end of a step."""

    def __init__(self) -> None:
        self.logs: Any = None

    def step_made(self, steps: int) -> None:
        pass

    def step_ends(self, steps: int, logs: Any) -> bool:
        self.logs = logs
        return False


class _OnItsWay:
    """A number that is still computed."""

    brought = 0

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        self.brought += 1
        return np.array(0.5)


@one_is_enough
def test_figures_of_a_step_are_waited_for_only_when_somebody_looks_at_them() -> None:
    number, watch = _OnItsWay(), _Recorder()
    hooks = make_hooks(
        KERAS,
        [],
        model=problems.classifier({"flavour": "keras"}),
        watch=watch,
        rank=0,
        size=1,
        epochs=1,
        steps=1,
    )
    hooks.on_train_batch_end(0, {"loss": number})
    assert "loss" in watch.logs
    later = watch.logs.later("loss")
    assert (list(watch.logs), number.brought) == (["loss"], 0)
    assert watch.logs.floats([later]) == [0.5]
    assert number.brought == 1
