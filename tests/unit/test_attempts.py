"""What a run does after a loss: how many workers the next attempt has, and when all of them return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kindler import RunSettings
from kindler.data.column_options import ColumnOptions
from kindler.engine.outcome import Outcome
from kindler.errors import WorkerLost
from kindler.estimator import fit
from kindler.estimator.fit import Model, Plan
from kindler.train.checkpoint_file import Header, write_checkpoint
from kindler.train.task import Task

RUN = "run-1"


def kept(
    folder: Path, epoch: int, *, step_in_epoch: int = 0, run: str = RUN, stopped: str | None = None
) -> None:
    header = Header(
        framework="torch", epoch=epoch, step=epoch * 7, step_in_epoch=step_in_epoch, run=run, stopped=stopped
    )
    name = f"checkpoint-{epoch:06d}-epoch-{epoch:05d}-step-{epoch * 7:09d}.kindler"
    write_checkpoint(folder / name, header, b"state")


def task(folder: Path | None) -> Task:
    return Task(
        framework="torch", data=None, run_id=RUN, epochs=3, batch_size=8, model_dir=folder and str(folder)
    )


class Crew:
    """Workers are missing; whether there is room for them again is set by the test."""

    full, size = 4, 3

    def __init__(self, *, could_be_full: bool) -> None:
        self.could_be_full = could_be_full


def heard(folder: Path | None, *, could_be_full: bool = True, **fields: Any) -> None:
    told = {"name": "epoch", "row": {"epoch": 2}, **fields}
    fit._Returns(Crew(could_be_full=could_be_full), task(folder)).heard(told)  # type: ignore[arg-type]


def test_all_workers_return_at_the_end_of_an_epoch_that_is_kept(tmp_path: Path) -> None:
    kept(tmp_path, 2)

    with pytest.raises(fit._ExecutorsAreBack, match="goes on with 4 instead of 3 workers"):
        heard(tmp_path)


def test_they_do_not_return_while_there_is_no_room_or_within_an_epoch(tmp_path: Path) -> None:
    kept(tmp_path, 2)

    heard(tmp_path, could_be_full=False)
    heard(tmp_path, name="progress")
    heard(None)


def test_they_do_not_return_where_the_epoch_would_have_to_be_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "_CHECKPOINT_WAIT_S", 0.0)
    kept(tmp_path, 1)
    kept(tmp_path, 3, step_in_epoch=2)
    kept(tmp_path, 4, run="another")

    heard(tmp_path)


@pytest.mark.parametrize(("epoch", "stopped"), [(3, None), (2, "a callback asked for it")])
def test_they_do_not_return_to_a_run_that_is_over(tmp_path: Path, epoch: int, stopped: str | None) -> None:
    kept(tmp_path, epoch, stopped=stopped)

    heard(tmp_path)


def test_a_return_goes_on_from_the_newest_checkpoint_and_is_no_failure(tmp_path: Path) -> None:
    said: list[str] = []
    began_with: list[int] = []
    results = [Outcome(0, "result")]

    def launch(checkpoints: Any) -> list[Outcome]:
        began_with.append(len(checkpoints))
        if len(began_with) == 1:
            kept(tmp_path, 1)
            raise WorkerLost("killed", rank=1, host="a")
        if len(began_with) == 2:
            kept(tmp_path, 2)
            raise fit._ExecutorsAreBack("the lost executors are back.")
        return results

    plan = Plan(
        model=Model(framework="torch", spec=None),
        data=None,
        options=ColumnOptions(),
        settings=RunSettings(max_failures=1, retry_backoff_s=0.01),
    )

    assert fit._Attempts(plan, task(tmp_path), launch, said.append).run() is results
    assert began_with == [0, 1, 1]
    assert "failure 1 of at most 1" in said[0]
    assert said[1].startswith("the lost executors are back. It goes on from")
    assert "epoch-00002" in said[1]


def test_local_runs_always_have_the_workers_that_were_asked_for() -> None:
    plan = Plan(
        model=Model(framework="torch", spec=None),
        data=None,
        options=ColumnOptions(),
        workers=3,
    )
    crew = fit._Crew(plan, None, lambda line: None)
    crew.gather()

    assert (crew.size, crew.full, crew.could_be_full) == (3, 3, False)
