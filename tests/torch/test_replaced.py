"""When workers die, others take their places; the survivors go on from the last whole step."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from interrupted import (
    DATA,
    EPOCHS,
    FALL,
    STEPS,
    Dies,
    Shaky,
    assert_same,
    figures,
    fit,
    processes,
    shaky,
    times_trained,
    weights,
)

import kindler
from kindler import RunSettings
from kindler.callbacks import Callback
from kindler.errors import WorkerLostError
from kindler.strategies import Zero1
from tests.exact import Note

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

LAST_OF_EPOCH = 2 * STEPS


class DiesInForward(Shaky):
    """The first worker whose training pass is the tenth ends within it; the others wait in the exchange."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.passes = str(folder), 0

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = super().forward(ids, x)
        self.passes += self.training
        if self.training and self.passes == 10:
            try:
                Path(self.folder, "died").touch(exist_ok=False)
            except FileExistsError:
                return outputs
            os.kill(os.getpid(), signal.SIGKILL)
        return outputs


class DiesWhileAnotherIsLate(Shaky):
    """In the tenth training pass, worker 2 dies after its part of the step is done and before worker 1's is.

    Worker 0 has both reasons to wait, and gives up; worker 1 then finds that it can complete the step.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.passes = str(folder), 0

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if self.training and self.passes == 10:
            rank, died = kindler.current_worker().rank, Path(self.folder, "died")
            if rank == 2 and not died.exists():
                died.touch()
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
            elif rank == 1:
                threading.Event().wait(3.0)
        outputs: torch.Tensor = super().forward(ids, x)
        return outputs


class Slowing(torch.optim.Adam):
    """Keeps something in its groups too, which its steps change."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.99
        return super().step(closure)


class DiesInUpdate(Slowing):
    """Worker 1 dies in its tenth step, before or after it has moved what is its own."""

    steps = 0

    def __init__(self, parameters: Any, lr: float, *, folder: Path, moment: str) -> None:
        super().__init__(parameters, lr)
        self.param_groups[0]["dies"] = str(folder), moment  # which travels with it

    def step(self, closure: Any = None) -> Any:
        folder, moment = self.param_groups[0]["dies"]
        self.steps += 1
        dies = self.steps == 10 and kindler.current_worker().rank == 1 and not Path(folder, "died").exists()
        if dies and moment == "after":
            super().step(closure)
        if dies:
            Path(folder, "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    """Returns the history and the weights of a run with this many workers that nothing happened to."""
    known: dict[Any, Any] = {}

    def of(workers: int, strategy: str = "allreduce") -> Any:
        if (workers, strategy) not in known:
            alone = shaky(workers=workers)
            known[workers, strategy] = figures(fit(alone, strategy=strategy)), weights(alone)
        return known[workers, strategy]

    return of


@pytest.mark.parametrize("strategy", ["allreduce", "zero1"])
@pytest.mark.parametrize(
    ("ranks", "workers", "hook", "step"),
    [
        ((1,), 2, "on_step_end", FALL),
        ((0,), 2, "on_step_begin", FALL),
        ((0, 2), 3, "on_step_end", FALL),  # several at once
        ((1,), 2, "on_step_end", LAST_OF_EPOCH),  # the others are at the end of the epoch
        ((1,), 2, "on_epoch_begin", LAST_OF_EPOCH),  # with no step of its own in this epoch
        ((0,), 2, "on_validation_begin", LAST_OF_EPOCH),
        ((0,), 2, "on_epoch_end", LAST_OF_EPOCH),
    ],
)
def test_survivors_keep_their_process_and_the_run_ends_as_if_undisturbed(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    undisturbed: Any,
    ranks: tuple[int, ...],
    workers: int,
    hook: str,
    step: int,
    strategy: str,
) -> None:
    expected, trained = undisturbed(workers, strategy)
    est = shaky(workers=workers)

    history = fit(est, Note(tmp_path), Dies(tmp_path, *ranks, hook=hook, step=step), strategy=strategy)

    assert figures(history) == expected
    assert_same(est, trained)
    assert processes(tmp_path) == [2 if rank in ranks else 1 for rank in range(workers)]
    assert times_trained(tmp_path) == dict.fromkeys(range(1, EPOCHS * STEPS + 1), 1)
    for rank in ranks:
        assert f"worker {rank} on" in caplog.text
    assert caplog.text.count("and no step was repeated") == len(ranks)


@pytest.mark.parametrize("strategy", ["allreduce", "zero1"])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_worker_that_dies_within_a_step_leaves_the_others_to_make_it_again(
    tmp_path: Path, undisturbed: Any, shared_memory: bool, strategy: str
) -> None:
    expected, trained = undisturbed(2, strategy)
    settings = RunSettings(shared_memory=shared_memory)
    est = shaky(model=DiesInForward(tmp_path), settings=settings)

    history = fit(est, strategy=strategy)

    assert (tmp_path / "died").exists()
    assert figures(history) == expected
    assert_same(est, trained)


@pytest.mark.parametrize("strategy", ["allreduce", "zero1"])
def test_a_worker_that_gave_a_step_up_gets_it_from_one_that_completed_it(
    tmp_path: Path, undisturbed: Any, strategy: str
) -> None:
    expected, trained = undisturbed(3, strategy)
    est = shaky(workers=3, model=DiesWhileAnotherIsLate(tmp_path))

    history = fit(est, strategy=strategy)

    assert (tmp_path / "died").exists()
    assert figures(history) == expected
    assert_same(est, trained)


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("divide", ["elements", "parameters"])
def test_slices_that_others_have_moved_are_moved_back_when_their_owner_dies_in_its_update(
    tmp_path: Path, divide: Any, moment: str, shared_memory: bool
) -> None:
    strategy, settings = Zero1(divide=divide), RunSettings(shared_memory=shared_memory)
    alone = shaky(workers=3, optimizer=Slowing, settings=settings)
    expected = figures(fit(alone, strategy=strategy))
    dies = partial(DiesInUpdate, folder=tmp_path, moment=moment)
    est = shaky(workers=3, optimizer=dies, settings=settings)

    history = fit(est, Dies(tmp_path), Note(tmp_path), strategy=strategy)

    assert (tmp_path / "died").exists()
    assert figures(history) == expected
    assert_same(est, weights(alone))
    assert processes(tmp_path) == [1, 2, 1]


def test_workers_that_exchange_over_the_network_are_replaced_after_a_step_too(
    tmp_path: Path, undisturbed: Any
) -> None:
    expected, trained = undisturbed(3)
    est = shaky(workers=3, settings=RunSettings(shared_memory=False))

    history = fit(est, Dies(tmp_path, 1))

    assert figures(history) == expected
    assert_same(est, trained)
    assert processes(tmp_path) == [1, 2, 1]


def test_a_loss_during_the_replacement_and_another_one_later_change_nothing(
    tmp_path: Path, undisturbed: Any
) -> None:
    expected, trained = undisturbed(2)
    folders = [tmp_path / name for name in ("first", "again", "later")]
    for folder in folders:
        folder.mkdir()
    est = shaky()

    history = fit(
        est,
        Dies(folders[0], 1),
        Dies(folders[1], 1, hook="on_run_begin"),  # at this step only the new process begins
        Dies(folders[2], 0, step=FALL + 5),
    )

    assert figures(history) == expected
    assert_same(est, trained)
    assert processes(folders[2]) == [2, 2]


def test_a_new_process_finds_the_rows_of_files_that_the_workers_read_together(tmp_path: Path) -> None:
    lists = [row.tolist() for row in DATA["x"]]
    table = pa.table({"id": DATA["id"], "x": pa.array(lists, pa.list_(pa.float32())), "y": DATA["y"]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=7)
    options: dict[str, Any] = {"data": str(tmp_path / "rows.parquet"), "validation_data": None}
    alone, est = shaky(), shaky()
    expected = figures(fit(alone, **options))

    history = fit(est, Dies(tmp_path, 0), **options)

    assert figures(history) == expected
    assert_same(est, weights(alone))
    assert processes(tmp_path) == [2, 1]


class Draws(Callback):
    """Callbacks may draw random numbers, which the model's dropout sees."""

    def on_step_begin(self, run: Any) -> None:
        torch.rand(1)

    def on_step_end(self, run: Any) -> None:
        torch.rand(1)


def test_random_numbers_that_callbacks_draw_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    alone, est = shaky(), shaky()
    expected = figures(fit(alone, Draws()))

    history = fit(est, Draws(), Dies(tmp_path, 1, hook="on_step_begin"))

    assert figures(history) == expected
    assert_same(est, weights(alone))


def test_a_worker_that_always_dies_at_the_same_step_ends_the_run(tmp_path: Path) -> None:
    class Always(Dies):
        def _now(self, hook: str, run: Any) -> None:
            if hook == "on_step_begin" and run.rank == 1 and run.step == FALL:
                os._exit(7)

    est = shaky(settings=RunSettings(max_failures=2))

    with pytest.raises(WorkerLostError, match="(?s)lost worker 1 .*exit code 7.*failed 3 times") as caught:
        fit(est, Always(tmp_path))

    assert caught.value.rank == 1
    assert processes(tmp_path) == [1, 3]


def test_no_worker_is_replaced_if_no_failures_are_allowed(tmp_path: Path) -> None:
    with pytest.raises(WorkerLostError, match="SIGKILL"):
        fit(shaky(settings=RunSettings(max_failures=0)), Dies(tmp_path, 1))

    assert processes(tmp_path) == [1, 1]


def test_a_worker_that_dies_after_its_last_step_restarts_the_run_from_the_checkpoint(
    tmp_path: Path, undisturbed: Any
) -> None:
    expected, trained = undisturbed(2)
    est = shaky()

    history = fit(est, Dies(tmp_path, 1, hook="on_run_end", step=EPOCHS * STEPS), folder=tmp_path / "run")

    assert figures(history) == expected
    assert_same(est, trained)
    assert processes(tmp_path)[0] == 2
