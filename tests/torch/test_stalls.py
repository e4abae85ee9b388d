"""A run whose workers all live while none gets any further ends with the stacks of those that are stuck."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Callback, Estimator, RunSettings
from kindler.errors import StalledError

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

X = np.linspace(0, 1, 64, dtype=np.float32).reshape(32, 2)
Y = X.sum(1)
STALL_S = 3.0


def regression(**options: Any) -> Estimator:
    settings = RunSettings(stall_timeout_s=STALL_S)
    options = {"model": nn.Linear(2, 1), "workers": 2, "settings": settings, **options}
    return Estimator.from_torch(optimizer=torch.optim.Adam, loss=nn.MSELoss(), **options)


class OnRankOne(Callback):
    """After the third step rank 1 does something that never ends."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_step_end(self, run: Any) -> None:
        if run.rank == 1 and run.step == 3:
            getattr(self, self.what)()

    def sleep_for_ever(self) -> None:
        threading.Event().wait()

    def hold_the_interpreter(self) -> None:
        while True:  # a signal ends the call
            ctypes.PyDLL(None).sleep(1000)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("sleep_for_ever", "threading.Event().wait()"),
        ("hold_the_interpreter", "ctypes.PyDLL(None).sleep(1000)"),
    ],
)
def test_a_rank_that_is_stuck_is_named_with_the_line_it_is_at(
    what: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StalledError) as caught, caplog.at_level(logging.ERROR, "kindler"):
        regression().fit((X, Y), epochs=2, batch_size=4, callbacks=[OnRankOne(what)], verbose=0)

    error = caught.value
    assert error.ranks == (1,)
    assert isinstance(error, TimeoutError)
    assert "worker 1 on" in str(error)
    assert line in str(error)
    assert sorted(error.stacks) == [0, 1]
    assert "stacks of worker 0" in caplog.text
    assert "stacks of worker 1" in caplog.text


def test_a_rank_whose_patience_ends_first_does_not_hide_the_stall() -> None:
    settings = RunSettings(stall_timeout_s=STALL_S, sync_timeout_s=STALL_S)

    with pytest.raises(StalledError, match=r"threading\.Event\(\)\.wait\(\)") as caught:
        regression(settings=settings).fit(
            (X, Y), batch_size=4, callbacks=[OnRankOne("sleep_for_ever")], verbose=0
        )

    assert caught.value.ranks == (1,)


class Waits(nn.Linear):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.training:
            threading.Event().wait()
        return super().forward(features)


def test_all_are_named_when_none_waits_for_another(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StalledError, match=r"threading\.Event\(\)\.wait\(\)") as caught:
        regression(model=Waits(2, 1)).fit((X, Y), batch_size=4)

    assert caught.value.ranks == (0, 1)
    assert "[worker 1] stalled" in "".join(capfd.readouterr())


class Slow(nn.Linear):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        time.sleep(0.5)  # what a large model does
        return super().forward(features)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_is_slow_and_moves_is_not_stalled(workers: int) -> None:
    est = regression(model=Slow(2, 1), workers=workers, settings=RunSettings(stall_timeout_s=2.0))

    history = est.fit((X, Y), batch_size=4, verbose=0)
    est.evaluate((X, Y), batch_size=4, verbose=0)

    assert history["steps"] == [8]


def test_after_a_stall_the_next_run_works() -> None:
    est = regression()
    with pytest.raises(StalledError, match="sleep_for_ever"):
        est.fit((X, Y), batch_size=4, callbacks=[OnRankOne("sleep_for_ever")], verbose=0)

    assert len(est.fit((X, Y), batch_size=4, verbose=0)) == 1
