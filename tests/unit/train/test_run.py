"""Where a run goes on from: decided alike by all workers, so that every row is used once per epoch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kindler.train.checkpoints import Header, pack
from kindler.train.loop import Start, over_already
from kindler.train.options import FitOptions, RunConfig, Task
from kindler.train.run import begin, usable
from kindler.train.triggers import Trigger


def after_steps(number: int) -> Trigger:
    return lambda progress: progress.step >= number


def after_epochs(number: int) -> Trigger:
    return lambda progress: progress.epoch - (not progress.epoch_ended) >= number


OPTIONS = FitOptions(batch_size=8, epochs=3)
TASK = Task(framework="torch", data=None, options=OPTIONS, config=RunConfig(seed=2))  # type: ignore[arg-type]
COUNTS, MARKS = (5, 6), ("a", "b")
MIDDLE = Header(
    framework="torch",
    epoch=2,
    step=9,
    step_in_epoch=2,
    first_epoch=0,
    counts=COUNTS,
    marks=MARKS,
    batch_size=8,
    seed=2,
    seconds=1.5,
    rows=({"epoch": 1},),
)
END = replace(MIDDLE, epoch=1, step=7, step_in_epoch=0)


class Replica:
    """Remembers what it was given to load."""

    def __init__(self, epoch: int = 0, step: int = 0) -> None:
        self.epoch, self.step, self.loaded = epoch, step, b""

    def load_state(self, data: bytes) -> None:
        self.loaded = data
        if data == b"trained":
            self.epoch, self.step = 4, 40


def file(header: Header) -> bytes:
    locals_ = () if header.ends_epoch else [b"mine of 0", b"mine of 1"]
    return b"".join(pack(header, [f"state of {header.step}".encode()], locals_))


def rows(counts: tuple[int, ...] = COUNTS, marks: tuple[str, ...] = MARKS) -> Any:
    return SimpleNamespace(counts=counts, marks=marks)


def begun(*files: bytes, state: bytes = b"", rank: int = 1, task: Task = TASK, **facts: Any) -> Any:
    replica = Replica()
    start = begin(replica, task, [state, *files], rows(**facts), rank=rank)
    return replica, start


def test_a_new_model_begins_at_the_beginning() -> None:
    replica, start = begun()

    assert replica.loaded == b""
    assert start == Start(epoch=0, step=0)


def test_a_trained_model_goes_on_from_where_it_is() -> None:
    replica, start = begun(state=b"trained")

    assert replica.loaded == b"trained"
    assert start == Start(epoch=4, step=40, first_epoch=4, first_step=40)


def test_the_same_rows_go_on_in_the_middle_of_the_epoch() -> None:
    replica, start = begun(file(MIDDLE), file(END), state=b"trained")

    assert replica.loaded == b"state of 9"
    assert (start.epoch, start.step, start.step_in_epoch, start.seconds) == (2, 9, 2, 1.5)
    assert start.local_states == (b"mine of 0", b"mine of 1")
    assert start.rows == ({"epoch": 1},)


@pytest.mark.parametrize(
    ("task", "facts"),
    [
        (TASK, {"counts": (11,)}),
        (TASK, {"counts": (6, 5)}),
        (TASK, {"marks": ("a", "c")}),
        (replace(TASK, config=RunConfig(seed=3)), {}),
        (replace(TASK, options=replace(OPTIONS, batch_size=4)), {}),
        (replace(TASK, options=replace(OPTIONS, shuffle=False)), {}),
        (replace(TASK, options=replace(OPTIONS, steps_per_epoch=5)), {}),
    ],
    ids=["rows", "lanes", "marks", "seed", "batch size", "shuffle", "steps per epoch"],
)
def test_other_rows_go_on_from_the_end_of_an_epoch(task: Task, facts: dict[str, Any]) -> None:
    replica, start = begun(file(MIDDLE), file(END), task=task, **facts)

    assert replica.loaded == b"state of 7"
    assert (start.epoch, start.step_in_epoch, start.local_states) == (1, 0, ())


def test_without_an_end_of_an_epoch_other_rows_begin_anew() -> None:
    replica, start = begun(file(MIDDLE), counts=(11,))

    assert replica.loaded == b""
    assert start == Start(epoch=0, step=0)


def test_where_nobody_counted_the_rows_the_middle_of_an_epoch_is_of_no_use() -> None:
    uncounted = replace(MIDDLE, counts=(), marks=())

    assert not usable(uncounted, TASK, rows((), ()))
    assert usable(END, TASK, rows((), ()))


def test_the_end_of_an_epoch_is_of_use_to_anybody() -> None:
    assert usable(
        END, replace(TASK, config=RunConfig(seed=9), options=FitOptions(batch_size=1)), rows((1, 2, 3))
    )


@pytest.mark.parametrize(
    ("start", "options", "over"),
    [
        (Start(epoch=0, step=0), {"stop_when": after_steps(5)}, False),
        (Start(epoch=1, step=5), {"stop_when": after_steps(5)}, True),
        (Start(epoch=1, step=5), {"stop_when": after_epochs(1)}, True),
        (Start(epoch=1, step=5), {"stop_when": after_epochs(2)}, False),
        (
            Start(epoch=1, step=5, rows=({"loss": 0.1},)),
            {"stop_when": lambda progress: progress.loss < 0.2},
            True,
        ),
        (Start(epoch=2, step=6, step_in_epoch=1), {"stop_when": after_steps(6)}, True),
        (Start(epoch=2, step=6, step_in_epoch=1), {"stop_when": after_epochs(2)}, False),
        (Start(epoch=2, step=6, step_in_epoch=1), {"max_steps": 6}, True),
        (Start(epoch=2, step=6, step_in_epoch=1), {"max_steps": 7}, False),
    ],
)
def test_a_run_that_has_nothing_left_to_do_is_over_before_its_first_step(
    start: Start, options: dict[str, Any], over: bool
) -> None:
    run = Task(framework="toy", options=FitOptions(batch_size=4, **options), data=None)  # type: ignore[arg-type]

    assert over_already(run, start) is over
