"""What a run does after a loss: how many workers the next attempt has, and when all of them return."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kindler import Checkpoints, RunSettings
from kindler.engine.outcome import Outcome
from kindler.errors import WorkerLostError
from kindler.estimator.run import ExecutorsAreBack, ReplacedWorkers, RunMoves, WorkerCount, attempts
from kindler.train.checkpoints import Header, pack, write_checkpoint
from kindler.train.options import FitOptions, RunConfig, Task

RUN = "run-1"


def kept(
    folder: Path, epoch: int, *, step_in_epoch: int = 0, run: str = RUN, stopped: str | None = None
) -> None:
    header = Header(
        framework="torch", epoch=epoch, step=epoch * 7, step_in_epoch=step_in_epoch, run=run, stopped=stopped
    )
    name = f"checkpoint-{epoch:06d}-epoch-{epoch:05d}-step-{epoch * 7:09d}.kindler"
    write_checkpoint(folder / name, header, b"state")


def task(folder: Path) -> Task:
    return Task(
        framework="torch",
        options=FitOptions(epochs=3, batch_size=8, checkpoint=Checkpoints(folder)),
        data=None,  # type: ignore[arg-type]
        run_id=RUN,
        config=RunConfig(settings=RunSettings(max_failures=1, retry_backoff_s=0.01)),
    )


class TooFew(WorkerCount):
    """Workers are missing; whether there is room for them again is set by the test."""

    can_grow = False  # type: ignore[assignment]


def heard(*, can_grow: bool = True, **fields: Any) -> None:
    count = TooFew(4, RunSettings(), None, lambda line: None)
    count.full, count.size, count.can_grow = 4, 3, can_grow  # type: ignore[assignment]
    count.hear({"name": "saved", "epoch": 2, "ends": False, **fields})


def test_all_workers_return_once_an_epoch_is_saved() -> None:
    with pytest.raises(ExecutorsAreBack, match="continues with 4 instead of 3 workers"):
        heard()


def test_they_do_not_return_while_there_is_no_room_or_nothing_is_saved_or_the_run_is_over() -> None:
    heard(can_grow=False)
    heard(name="epoch", row={"epoch": 2})
    heard(name="progress")
    heard(ends=True)


def test_a_return_goes_on_from_the_newest_checkpoint_and_is_no_failure(tmp_path: Path) -> None:
    said: list[str] = []
    began_with: list[int] = []
    results = [Outcome(0, "result")]

    def launch(checkpoints: Any) -> list[Outcome]:
        began_with.append(len(checkpoints))
        if len(began_with) == 1:
            kept(tmp_path, 1)
            raise WorkerLostError("killed", rank=1, host="a")
        if len(began_with) == 2:
            kept(tmp_path, 2)
            raise ExecutorsAreBack("the lost executors are back.")
        return results

    work = task(tmp_path)
    replaced = ReplacedWorkers(work.config.settings)
    assert attempts(work, launch, said.append, replaced) is results
    assert began_with == [0, 1, 1]
    assert "failure 1 of at most 1" in said[0]
    assert said[1].startswith("the lost executors are back. It resumes from")
    assert "epoch-00002" in said[1]


NOTICES = [{"worker": 1, "host": "a", "reason": "SIGTERM", "key": ""}]


def test_a_notice_is_no_failure_and_goes_on_from_what_the_folder_has(tmp_path: Path) -> None:
    said: list[str] = []
    began_with: list[list[int]] = []
    results = [Outcome(0, "result")]

    def launch(checkpoints: Any) -> list[Outcome]:
        began_with.append([stored.header.step for stored in checkpoints])
        if len(began_with) > 3:
            return results
        kept(tmp_path, len(began_with))
        raise RunMoves(NOTICES, step=7 * len(began_with))

    assert (
        attempts(task(tmp_path), launch, said.append, ReplacedWorkers(task(tmp_path).config.settings))
        is results
    )
    assert began_with == [[], [7], [14], [21]], "more often than max_failures"
    assert said[0] == (
        "worker 1 on a was given notice (SIGTERM): the run was saved after step 7 and continues with new"
        " workers."
    )


def test_without_a_folder_a_run_that_moves_goes_on_from_what_its_workers_returned(tmp_path: Path) -> None:
    said: list[str] = []
    began_with: list[list[int]] = []
    results = [Outcome(0, "result")]
    file = b"".join(pack(Header(framework="torch", epoch=1, step=5, step_in_epoch=5), [b"state"]))
    moves = [
        RunMoves(NOTICES, step=5, checkpoint=file),
        RunMoves([{**NOTICES[0], "worker": None}], step=None),  # before the next step
    ]

    def launch(checkpoints: Any) -> list[Outcome]:
        began_with.append([stored.header.step for stored in checkpoints])
        if moves:
            raise moves.pop(0)
        return results

    without = replace(task(tmp_path), options=FitOptions(epochs=3, batch_size=8))
    assert attempts(without, launch, said.append, ReplacedWorkers(task(tmp_path).config.settings)) is results
    assert began_with == [[], [5], [5]]
    assert said[1].startswith("a was given notice (SIGTERM): the run starts again with new workers")


def test_workers_that_were_replaced_count_as_failures(tmp_path: Path) -> None:
    work = task(tmp_path)
    replaced = ReplacedWorkers(work.config.settings)
    assert replaced.left == 1

    def launch(checkpoints: Any) -> list[Outcome]:
        replaced.hear({"name": "regrouped", "worker": 0})
        raise WorkerLostError("killed", rank=1, host="a")

    with pytest.raises(WorkerLostError, match="failed 2 times"):
        attempts(work, launch, lambda line: None, replaced)
    assert replaced.left == 0


def test_local_runs_always_have_the_workers_that_were_asked_for() -> None:
    count = WorkerCount(3, RunSettings(), None, lambda line: None)
    count.resolve()

    assert (count.size, count.full, count.can_grow) == (3, 3, False)
