"""A program that uses Kindler finds its own randomness, threads and settings as it left them."""

from __future__ import annotations

import functools
import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kindler import Estimator
from kindler.callbacks import Callback, DriverCallback, Run
from kindler.errors import ConfigError
from tests import caller

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
DATA = {"x": X, "y": X.sum(1, keepdims=True)}


def careless_model(config: dict[str, float]) -> torch.nn.Module:
    """Draws, and leaves settings behind that are none of its business."""
    random.random()
    np.random.random()
    torch.set_default_dtype(torch.float64)
    try:
        return torch.nn.Linear(3, 1).float()
    finally:
        torch.set_num_threads(1)


def estimator(**options: object) -> Estimator:
    adam = functools.partial(torch.optim.Adam, lr=0.1)
    return Estimator.from_torch(
        model=careless_model, optimizer=adam, loss=torch.nn.MSELoss(), workers=1, engine="local", **options
    )


@pytest.mark.usefixtures("no_workers_left")
def test_no_call_changes_the_callers_randomness_threads_or_settings(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # the first one sets a variable of torch's own
    calls = caller.entries(estimator, DATA, X, tmp_path, suffix=".pt")

    assert set(calls) | {"from_keras"} | caller.ELSEWHERE == caller.public_entries()
    assert caller.changed_by(calls) == {}


def test_trials_of_a_random_search_draw_different_values() -> None:
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    drawn = []
    for _ in range(2):
        drawn.append((random.random(), np.random.random(), torch.rand(1).item()))
        estimator().get_model()

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    undisturbed = [(random.random(), np.random.random(), torch.rand(1).item()) for _ in range(2)]
    assert drawn == undisturbed
    assert drawn[0] != drawn[1]


class Meanwhile(DriverCallback):
    """Holds a run at the end of its epoch until another thread has had its turn."""

    def __init__(self) -> None:
        self.reached, self.over = threading.Event(), threading.Event()

    def on_epoch_end(self, row: Any) -> None:
        self.reached.set()
        assert self.over.wait(60)


@pytest.mark.usefixtures("no_workers_left")
def test_what_a_thread_draws_and_sets_while_another_one_trains_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    threads = torch.get_num_threads()

    def draw() -> tuple[float, ...]:
        return random.random(), np.random.random(), torch.rand(1).item()

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    undisturbed = [draw() for _ in range(3)]
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    drawn, turn = [draw()], Meanwhile()
    train = functools.partial(estimator().fit, DATA, batch_size=8, verbose=0, callbacks=[turn])
    training = threading.Thread(target=train)
    training.start()
    assert turn.reached.wait(60)
    drawn.append(draw())
    sys.path.append("a folder of the other thread's")
    torch.set_num_threads(3)
    turn.over.set()
    training.join()

    assert [*drawn, draw()] == undisturbed
    assert sys.path[-1] == "a folder of the other thread's"
    assert torch.get_num_threads() == 3
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "7", None, True])
def test_a_seed_that_is_no_whole_number_is_refused(seed: object) -> None:
    with pytest.raises(ConfigError, match=r"seed must be a whole number from 0 to 2\*\*63 - 1; received"):
        estimator(seed=seed)
    estimator(seed=np.int64(3))  # one of numpy's is one


class Draws(Callback):
    """Files what user code would draw after each step: Python, numpy, torch."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def on_step_end(self, run: Run) -> None:
        drawn = [random.random(), np.random.random(), torch.rand(1).item()]
        with Path(self.folder, f"{run.rank}.txt").open("a") as file:
            file.write(json.dumps([run.epoch, drawn]) + "\n")


def drawn(folder: Path, *fits: int) -> list[list[list[float]]]:
    folder.mkdir()
    est = Estimator.from_torch(
        model=functools.partial(torch.nn.Linear, 3, 1),
        optimizer=torch.optim.SGD,
        loss=torch.nn.MSELoss(),
        workers=2,
        engine="local",
        seed=4,
    )
    for epochs in fits:
        est.fit(DATA, epochs=epochs, batch_size=8, verbose=0, callbacks=[Draws(folder)])
    return [[json.loads(line)[1] for line in (folder / f"{rank}.txt").open()] for rank in range(2)]


@pytest.mark.usefixtures("no_workers_left")
def test_user_code_draws_other_numbers_on_each_worker_and_epoch_and_the_same_in_each_run(
    tmp_path: Path,
) -> None:
    once = drawn(tmp_path / "once", 3)

    for kind in range(3):
        numbers = [line[kind] for rank in once for line in rank]
        assert len(numbers) == len(set(numbers)) == 12, kind
    assert drawn(tmp_path / "again", 3) == once
    assert drawn(tmp_path / "in two runs", 1, 2) == once
