"""A run says where its time went; each part is checked by the clock of what was made to take time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interrupted import FALL, KEPT, Falls, attempts, fit, shaky
from torch import nn

import kindler
from kindler import Estimator, strategies
from kindler.callbacks import Callback, DriverCallback, TensorBoard
from tests.events import scalars
from tests.whole import whole_only

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

PARTS = ["steps", "start", "ingest", "sync", "validation", "checkpoint", "recovery", "other"]
X = np.linspace(0, 1, 84, dtype=np.float32).reshape(42, 2)
Y = X.sum(1)
SLOW_S = 0.02


def regression(workers: int = 2) -> Estimator:
    return Estimator.from_torch(
        model=nn.Linear(2, 1), optimizer=torch.optim.SGD, loss=nn.MSELoss(), workers=workers
    )


class Timed:
    """Takes time, and writes down how much: one line for each time, with a name."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def take(self, name: Any) -> None:
        began = time.perf_counter()
        threading.Event().wait(SLOW_S)
        rank = kindler.current_worker().rank
        with Path(self.folder, f"took-{rank}.jsonl").open("a") as file:
            file.write(json.dumps([name, time.perf_counter() - began]) + "\n")


def taken(folder: Path) -> list[tuple[Any, float]]:
    """What the first worker wrote down, in order."""
    lines = Path(folder, "took-0.jsonl").read_text().splitlines()
    return [(name, seconds) for name, seconds in map(json.loads, lines)]


class Within(DriverCallback):
    """Times the run on the driver, from before the workers start to their last report."""

    def on_run_begin(self, params: Any) -> None:
        self.began = time.perf_counter()

    def on_epoch_end(self, logs: Any) -> None:
        self.seconds = time.perf_counter() - self.began

    def on_run_end(self, status: str, error: Any, estimator: Any) -> None:
        self.goodput = estimator.history.goodput


@pytest.mark.parametrize(
    "strategy", [strategies.AllReduce(), strategies.LocalSGD(), strategies.Async()], ids=lambda s: s.name
)
def test_the_parts_add_up_to_the_wall_time(strategy: strategies.Strategy) -> None:
    within, began = Within(), time.perf_counter()
    history = regression().fit(
        (X, Y),
        epochs=2,
        batch_size=14,
        validation_data=(X, Y),
        strategy=strategy,
        callbacks=[within],
        verbose=0,
    )
    around = time.perf_counter() - began

    goodput = history.goodput
    assert goodput is not None
    seconds = goodput.seconds
    assert list(seconds) == PARTS
    assert within.seconds <= sum(seconds.values()) <= around
    assert min(seconds.values()) >= 0.0
    assert seconds["recovery"] == 0.0
    assert all(seconds[part] > 0.0 for part in ("steps", "start", "ingest", "validation"))
    assert seconds["steps"] + seconds["ingest"] + seconds["sync"] >= sum(history["seconds"])
    assert goodput.share == seconds["steps"] / goodput.wall_s


def test_driver_callbacks_see_that_of_their_call_when_it_ends() -> None:
    est, calls = regression(), [Within(), Within()]
    returned = [est.fit((X, Y), batch_size=14, callbacks=[call], verbose=0).goodput for call in calls]

    assert [call.goodput for call in calls] == returned
    assert returned[0] != returned[1] == est.history.goodput


def test_tensorboard_has_each_part_so_far_at_the_end_of_every_epoch(tmp_path: Path) -> None:
    history = regression().fit((X, Y), 2, 14, callbacks=[TensorBoard(tmp_path)], verbose=0)

    train = scalars(tmp_path / "train")
    for part in PARTS:
        assert [step for step, _ in train[f"goodput/{part}"]] == [3, 6]
    steps, share = (dict(train[f"goodput/{name}"]) for name in ("steps", "share"))
    assert history.goodput is not None
    assert 0 < steps[3] < steps[6] == pytest.approx(history.goodput.seconds["steps"])
    assert share[6] == pytest.approx(steps[6] / sum(train[f"goodput/{part}"][-1][1] for part in PARTS))


class Slow(torch.utils.data.IterableDataset[Any]):
    def __init__(self, timed: Timed) -> None:
        self.timed = timed

    def __iter__(self) -> Iterator[Any]:
        for place in range(0, 42, 14):
            self.timed.take("batch")
            yield X[place : place + 14], Y[place : place + 14]


def test_a_slow_loader_is_ingest(tmp_path: Path) -> None:
    data = torch.utils.data.DataLoader(Slow(Timed(tmp_path)), batch_size=None)
    goodput = regression(workers=1).fit(data, epochs=2, verbose=0).goodput

    took = taken(tmp_path)
    assert len(took) >= 6
    assert goodput is not None
    assert goodput.seconds["ingest"] >= sum(seconds for _, seconds in took)


class Heavy(Timed, Callback):
    """Its state takes time to collect, which happens when a checkpoint is made."""

    def state_dict(self) -> dict[str, Any]:
        self.take("state")
        return {}


def test_what_training_waits_for_a_checkpoint_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    goodput = (
        regression()
        .fit((X, Y), epochs=2, batch_size=14, callbacks=[Heavy(tmp_path)], checkpoint=folder, verbose=0)
        .goodput
    )

    took = taken(tmp_path)
    assert len(took) == 2
    assert goodput is not None
    assert goodput.seconds["checkpoint"] >= sum(seconds for _, seconds in took)


class Steps(Timed, Callback):
    """Each step takes time."""

    def on_step_begin(self, run: Any) -> None:
        self.take(run.step + 1)


@whole_only
def test_a_restart_is_recovery_and_no_step_is_new_twice(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    falls = Falls(tmp_path, "die", checkpoints=folder, rank=None)
    goodput = fit(shaky(), Steps(tmp_path), falls, folder=folder).goodput

    assert attempts(tmp_path) == [2, 2]
    took = taken(tmp_path)
    again = [at for at, (step, _) in enumerate(took) if step == KEPT + 1]
    assert len(again) == 2
    lost = took[again[0] : again[1]]  # steps after the checkpoint that the run continued from
    assert [step for step, _ in lost][: FALL - KEPT] == list(range(KEPT + 1, FALL + 1))
    kept = took[: again[0]] + took[again[1] :]
    assert [step for step, _ in kept] == list(range(1, len(kept) + 1))
    assert goodput is not None
    assert goodput.seconds["recovery"] >= sum(seconds for _, seconds in lost)
    assert goodput.seconds["steps"] >= sum(seconds for _, seconds in kept)
    assert sum(goodput.seconds.values()) == goodput.wall_s


@pytest.mark.parametrize("rank", [0, 1])
def test_the_replacement_of_a_worker_is_recovery_and_what_came_before_counts(
    tmp_path: Path, rank: int
) -> None:
    goodput = fit(shaky(), Steps(tmp_path), Falls(tmp_path, "die", rank=rank)).goodput

    assert attempts(tmp_path) == [2] * (2 - rank)  # the first worker's processes
    assert goodput is not None
    assert goodput.seconds["recovery"] > 0.0
    assert goodput.seconds["steps"] >= sum(dict(taken(tmp_path)).values())
    assert sum(goodput.seconds.values()) == goodput.wall_s


def test_a_run_that_is_resumed_by_its_user_counts_the_time_of_this_call_only(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fit(shaky(), Steps(tmp_path), folder=folder, epochs=1)
    earlier = len(taken(tmp_path))

    began = time.perf_counter()
    goodput = fit(shaky(), Steps(tmp_path), folder=folder, resume=True).goodput
    around = time.perf_counter() - began

    assert goodput is not None
    assert goodput.seconds["recovery"] == 0.0
    assert goodput.seconds["steps"] >= sum(seconds for _, seconds in taken(tmp_path)[earlier:])
    assert goodput.wall_s <= around


def test_the_last_line_of_a_run_shows_it_and_that_of_an_evaluation_does_not(
    capfd: pytest.CaptureFixture[str],
) -> None:
    est = regression()
    history = est.fit((X, Y), batch_size=14)

    assert capfd.readouterr().err.splitlines()[-1] == str(history.goodput)
    est.evaluate((X, Y))
    assert "goodput" not in capfd.readouterr().err
