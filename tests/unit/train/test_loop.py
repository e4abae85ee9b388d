"""Checkpoints within an epoch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kindler.config import Checkpoints
from kindler.engine.meeting import Halting
from kindler.errors import NonFiniteLossError
from kindler.train.goodput import Stopwatch
from kindler.train.loop import Loop, Start
from kindler.train.options import FitOptions, Task


def loop(folder: Path, replica: Any, report: Any = lambda name, **fields: None) -> Loop:
    checkpoint = Checkpoints(folder, every=1, keep=1)
    training = FitOptions(batch_size=1, epochs=2, shuffle=False, checkpoint=checkpoint)
    task = Task(framework="torch", options=training, data=None, run_id="r")  # type: ignore[arg-type]
    worker: Any = SimpleNamespace(rank=0, size=1, leads=True, replaceable=False, report=report)
    rows: Any = SimpleNamespace(counts=[8], marks=[], steps=8, expected=8, prepares=False)
    sync: Any = SimpleNamespace(
        in_step=True, ends_at=None, waited_s=0.0, whole=lambda whole: whole, next_epoch=lambda *_: None
    )
    return Loop(worker, task, replica, sync, rows, None, Start(epoch=0, step=0), Stopwatch())


def test_the_driver_hears_of_an_epochs_checkpoint_once_it_is_written(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []

    def report(name: str, **fields: Any) -> None:
        if name == "saved":
            heard.append({"name": name, "files": len(list(tmp_path.glob("*.kindler"))), **fields})

    replica: Any = SimpleNamespace(
        epoch=1, step=8, freeze=lambda: lambda: [b"state"], wait_for_copy=lambda: None
    )
    run = loop(tmp_path, replica, report)
    with run.writing():
        for epoch in (1, 2):
            replica.epoch = epoch
            run.end_epoch({"epoch": epoch}, stopped=None)

    assert heard == [
        {"name": "saved", "files": 1, "epoch": 1, "ends": False},
        {"name": "saved", "files": 1, "epoch": 2, "ends": True},
    ]


def test_none_is_written_after_a_loss_that_was_not_looked_at_yet_and_is_not_a_number(tmp_path: Path) -> None:
    run = loop(tmp_path / "run", SimpleNamespace(epoch=1, step=1))
    run.guard.note(1, float("nan"), lambda: ([], ""))  # as a loss on a GPU is for a while

    with pytest.raises(NonFiniteLossError, match="step 1"):
        run.after_step(1, asked=False)

    assert list(tmp_path.rglob("*")) == []


def test_who_begins_an_epoch_late_joins_those_that_an_interrupt_found_in_it(tmp_path: Path) -> None:
    halting = Halting()
    run = loop(tmp_path, SimpleNamespace(epoch=56, step=9))
    run.sync.in_step = False
    run.worker.go_on = partial(halting.go_on, timeout_s=1)
    assert run.goes_on(56)
    halting.asked()
    halting.answer(57)  # where another worker is

    assert run.goes_on(57, begins=True)  # all meet at its end
    assert not run.goes_on(57)
    assert not run.goes_on(58, begins=True)


def test_all_end_an_epoch_as_interrupted_if_one_was(tmp_path: Path) -> None:
    run = loop(tmp_path, SimpleNamespace(epoch=1, step=1, merge_buffers=lambda: None))
    run.sync.in_step = False
    run.sync.catch_up = lambda replica: None
    run.worker.size, run.worker.total = 2, lambda numbers: [numbers[0] + 1]
    assert not run.halted

    run.catch_up()

    assert run.halted
