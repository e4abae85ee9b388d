"""Checkpoints within an epoch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from kindler.config import Checkpoints
from kindler.engine.meeting import Halting
from kindler.errors import NonFiniteLossError
from kindler.train.checkpoints import CheckpointFolder
from kindler.train.fit_loop import FitLoop
from kindler.train.goodput import Stopwatch
from kindler.train.loop import Loop, Point, Start, _Moved, over_already
from kindler.train.options import FitOptions, Task
from kindler.train.step_loop import StepLoop
from kindler.train.triggers import Progress


def task_of(training: FitOptions) -> Task:
    return Task(framework="torch", options=training, data=None, run_id="r")  # type: ignore[arg-type]


def at(epoch: int, step: int) -> Any:
    """A replica that stands there."""
    return SimpleNamespace(
        epoch=epoch, step=step, freeze=lambda: lambda: [b"state"], wait_for_copy=lambda: None
    )


def loop(folder: Path, replica: Any, report: Any = lambda name, **fields: None, **options: Any) -> Loop:
    checkpoint = Checkpoints(folder, every=1, keep=1)
    asked = {"batch_size": 1, "epochs": 2, "shuffle": False, "checkpoint": checkpoint, **options}
    task = task_of(FitOptions(**asked))
    worker: Any = SimpleNamespace(rank=0, size=1, leads=True, replaceable=False, moves=False, report=report)
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

    replica = at(1, 8)
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


def test_workers_that_meet_again_at_the_beginning_of_an_epoch_leave_as_of_the_one_before(
    tmp_path: Path,
) -> None:
    run = loop(tmp_path, at(2, 8))
    run.worker.go_on, run.worker.moves = lambda number, whole: False, True
    with pytest.raises(_Moved) as moved:
        run.goes_on(2, begins=True)
    assert moved.value.checkpoint == b"", "it is in the folder"

    (saved,) = CheckpointFolder(tmp_path).resume_candidates()
    assert (saved.header.epoch, saved.header.step_in_epoch) == (1, 0)


@pytest.mark.parametrize("start", [{"step_in_epoch": 1}, {"point": Point(snapshot=None)}])
def test_whether_to_go_on_with_an_epoch_that_has_begun_is_decided_before_its_next_step(
    start: dict[str, Any],
) -> None:
    run: Any = SimpleNamespace(start=Start(epoch=2, step=9, **start), goes_on=lambda epoch, begins: False)
    assert StepLoop._enters(run, 2)
    assert not StepLoop._enters(run, 3)


def test_a_fit_of_keras_in_which_workers_have_met_again_makes_a_step_before_it_may_leave() -> None:
    run = MagicMock(is_over=False, last_epoch=2, _length=4)
    run.start = Start(epoch=2, step=4, point=Point(snapshot=None))

    FitLoop.run(run)

    run.goes_on.assert_not_called()
    run.replica.fit.assert_called_once()


def test_all_end_an_epoch_as_interrupted_if_one_was(tmp_path: Path) -> None:
    run = loop(tmp_path, SimpleNamespace(epoch=1, step=1, merge_buffers=lambda: None))
    run.sync.in_step = False
    run.sync.catch_up = lambda replica: None
    run.worker.size, run.worker.total = 2, lambda numbers: [numbers[0] + 1]
    assert not run.halted

    run.catch_up()

    assert run.halted


@pytest.mark.parametrize(
    ("epoch", "options", "stopped", "over"),
    [
        (1, {}, None, False),
        (2, {}, None, True),
        (1, {}, "a callback", True),
        (1, {"stop_when": lambda progress: progress.loss < 0.6}, None, True),
        (1, {"stop_when": lambda progress: progress.loss < 0.4}, None, False),
    ],
    ids=["first", "last", "stopped", "triggered", "not triggered"],
)
def test_a_run_is_over_after_its_last_epoch_or_when_a_callback_or_a_trigger_says_so(
    tmp_path: Path, epoch: int, options: dict[str, Any], stopped: str | None, over: bool
) -> None:
    run, told = loop(tmp_path, at(epoch, 8), **options), list[Any]()
    run.sync.next_epoch = lambda replica, row: told.append(row)  # type: ignore[method-assign]
    with run.writing():
        run.end_epoch({"epoch": epoch, "loss": 0.5}, stopped=stopped)

    assert (run.is_over, told) == (over, run.rows), "schedules of the sync follow every epoch"
    assert len(list(tmp_path.glob("*.kindler"))) == 1


@pytest.mark.parametrize(("step", "over"), [(7, False), (8, True), (9, True)])
def test_a_run_is_over_once_it_has_made_its_steps(tmp_path: Path, step: int, over: bool) -> None:
    run = loop(tmp_path, at(1, step))
    run.sync.ends_at = 8

    assert run.ends_within_epoch() is over


@pytest.mark.parametrize("asked", [False, True])
def test_a_checkpoint_is_written_when_a_trigger_or_a_callback_asks_for_it(
    tmp_path: Path, asked: bool
) -> None:
    run = loop(tmp_path, at(1, 8), checkpoint=Checkpoints(tmp_path, every=lambda progress: False))
    with run.writing():
        run.end_epoch({"epoch": 1}, stopped=None, asked=asked)

    assert len(list(tmp_path.glob("*.kindler"))) == int(asked)


@pytest.mark.parametrize(("steps", "epoch"), [(3, 2), (0, 1)])
def test_an_interrupted_epoch_is_recorded_if_it_has_steps_and_never_saved(
    tmp_path: Path, steps: int, epoch: int
) -> None:
    heard: list[tuple[str, dict[str, Any]]] = []
    run = loop(tmp_path, at(2, 8 + steps), lambda name, **fields: heard.append((name, fields)))
    run.halted, row = True, {"epoch": 2, "steps": steps}
    run.end_epoch(row, stopped=None)

    assert (run.is_over, run.replica.epoch, run.rows) == (True, epoch, [row] if steps else [])
    told = [(name, {**fields, "spent": None}) for name, fields in heard]
    assert told == ([("epoch", {"row": row, "step": 11, "whole": False, "spent": None})] if steps else [])
    assert list(tmp_path.glob("*.kindler")) == []


@pytest.mark.parametrize(("replaceable", "halted"), [(True, False), (True, True), (False, False)])
def test_a_replacement_begins_at_the_last_whole_epoch(
    tmp_path: Path, replaceable: bool, halted: bool
) -> None:
    kept: list[bytes] = []
    run = loop(tmp_path, at(1, 8))
    run.worker.replaceable, run.worker.keep = replaceable, kept.append
    run.halted = halted
    with run.writing():
        run.end_epoch({"epoch": 1, "steps": 8}, stopped=None)

    assert [b"state" in state for state in kept] == [True] * (replaceable and not halted)


def is_over(training: FitOptions, **start: Any) -> bool:
    return over_already(task_of(training), Start(**{"epoch": 0, "step": 0, **start}))


def test_steps_of_a_resumed_run_count_from_where_it_first_began() -> None:
    five = FitOptions(max_steps=5)

    assert [is_over(five, step=step, first_step=10) for step in (10, 14, 15, 16)] == [
        False,
        False,
        True,
        True,
    ]


def test_a_trigger_is_asked_again_before_a_run_continues() -> None:
    seen: list[Progress] = []
    triggered = FitOptions(stop_when=lambda progress: seen.append(progress) or True)
    rows = ({"loss": 1.0}, {"loss": 0.75}, {"loss": 0.5})

    assert not is_over(triggered), "a new model has made no step"
    assert is_over(triggered, epoch=2, step=7, step_in_epoch=3, rows=rows)
    assert is_over(triggered, epoch=2, step=8, rows=rows)
    assert is_over(triggered, epoch=2, step=8), "trained by another run: its next epoch begins"
    assert seen == [
        Progress(epoch=2, step=7),
        Progress(epoch=2, step=8, epoch_ended=True, loss=0.5),
        Progress(epoch=3, step=8),
    ]
    assert not is_over(FitOptions(stop_when=lambda progress: False), epoch=2, step=8)
    assert not is_over(FitOptions(epochs=1), epoch=2, step=8)
