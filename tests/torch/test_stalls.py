"""A run whose workers all live while none gets any further ends with the stacks of those that are stuck.

The runs wait for the limit rather than compute, so they all wait at the same time.
"""

from __future__ import annotations

import ctypes
import io
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Estimator, RunSettings
from kindler.callbacks import Callback
from kindler.errors import StalledError

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

X = np.linspace(0, 1, 64, dtype=np.float32).reshape(32, 2)
Y = X.sum(1)
# A worker that waits for a busy core must not count as stuck.
STALL_S = 12.0
STEPS = 8


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


class Waits(nn.Linear):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.training:
            threading.Event().wait()
        return super().forward(features)


class Slow(nn.Linear):
    """All steps together take longer than the limit, and each of them a small part of it."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        time.sleep(1.25 * STALL_S / STEPS)  # what a large model does
        return super().forward(features)


def stalls(estimator: Estimator, **options: Any) -> StalledError:
    with pytest.raises(StalledError, match=r"worker 1 on") as caught:
        estimator.fit((X, Y), batch_size=4, **options)
    return caught.value


def stalls_and_goes_on() -> tuple[StalledError, int]:
    est = regression()
    error = stalls(est, epochs=2, callbacks=[OnRankOne("sleep_for_ever")], verbose=0)
    return error, len(est.fit((X, Y), batch_size=4, verbose=0))


def impatient() -> StalledError:
    settings = RunSettings(stall_timeout_s=STALL_S, sync_timeout_s=STALL_S)
    return stalls(regression(settings=settings), callbacks=[OnRankOne("sleep_for_ever")], verbose=0)


RUNS: dict[str, Callable[[], Any]] = {
    "sleeps": stalls_and_goes_on,
    "holds the interpreter": lambda: stalls(
        regression(), epochs=2, callbacks=[OnRankOne("hold_the_interpreter")], verbose=0
    ),
    "impatient": impatient,
    "all wait": lambda: stalls(regression(model=Waits(2, 1))),
    "slow, 1 worker": lambda: regression(model=Slow(2, 1), workers=1).fit((X, Y), batch_size=4, verbose=0),
    "slow, 2 workers": lambda: regression(model=Slow(2, 1)).fit((X, Y), batch_size=4, verbose=0),
    "slow to evaluate": lambda: regression(model=Slow(2, 1)).evaluate((X, Y), batch_size=4, verbose=0),
}


@dataclass(frozen=True)
class Outcomes:
    """How the runs ended, and what all of them logged and printed."""

    of: dict[str, Future[Any]]
    logged: str
    printed: str


@pytest.fixture(scope="module")
def ends() -> Outcomes:
    log, printed = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("kindler").addHandler(handler)
    try:
        with redirect_stdout(printed), ThreadPoolExecutor(len(RUNS)) as pool:
            futures = {name: pool.submit(run) for name, run in RUNS.items()}
    finally:
        logging.getLogger("kindler").removeHandler(handler)
    return Outcomes(futures, log.getvalue(), printed.getvalue())


def test_a_rank_that_is_stuck_is_named_with_the_line_it_is_at(ends: Outcomes) -> None:
    stuck = {
        "threading.Event().wait()": ends.of["sleeps"].result()[0],
        "ctypes.PyDLL(None).sleep(1000)": ends.of["holds the interpreter"].result(),
    }

    for line, error in stuck.items():
        assert error.ranks == (1,)
        assert isinstance(error, TimeoutError)
        assert line in str(error)
        assert sorted(error.stacks) == [0, 1]
    assert "stacks of worker 0" in ends.logged
    assert "stacks of worker 1" in ends.logged


def test_a_rank_whose_patience_ends_first_does_not_hide_the_stall(ends: Outcomes) -> None:
    error = ends.of["impatient"].result()

    assert "threading.Event().wait()" in str(error)
    assert error.ranks == (1,)


def test_all_are_named_when_none_waits_for_another(ends: Outcomes) -> None:
    error = ends.of["all wait"].result()

    assert "threading.Event().wait()" in str(error)
    assert error.ranks == (0, 1)
    assert "[worker 1] stalled" in ends.printed


@pytest.mark.parametrize("workers", ["1 worker", "2 workers"])
def test_a_run_that_is_slow_and_moves_is_not_stalled(ends: Outcomes, workers: str) -> None:
    assert ends.of[f"slow, {workers}"].result()["steps"] == [STEPS]


def test_an_evaluation_that_is_slow_and_moves_is_not_stalled(ends: Outcomes) -> None:
    assert ends.of["slow to evaluate"].result()["num_samples"] == len(X)


def test_after_a_stall_the_next_run_works(ends: Outcomes) -> None:
    assert ends.of["sleeps"].result()[1] == 1
