"""A run whose worker, machine or driver is given notice loses no step and repeats none."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interrupted import (
    EPOCHS,
    FALL,
    STEPS,
    Falls,
    assert_same,
    attempts,
    figures,
    fit,
    notes,
    shaky,
    times_trained,
    weights,
)
from torch import nn

from kindler import Estimator, RunSettings
from kindler.callbacks import Callback
from tests.exact import await_file
from tests.whole import whole_only

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

ROOT = Path(__file__).parents[2]
ALL_STEPS = dict.fromkeys(range(1, EPOCHS * STEPS + 1), 1)


@pytest.fixture(scope="module")
def whole() -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Figures and weights of the run that nobody disturbs."""
    est = shaky()
    history = fit(est)
    return figures(history), weights(est)


class Terminated(Falls):
    """Gets SIGTERM once, on some ranks, after one step or as something else of the run begins."""

    def __init__(self, folder: Path, *, ranks: tuple[int, ...] = (1,), at: str = "step", times: int = 1):
        super().__init__(folder, "sigterm")
        self.ranks, self.at, self.times = ranks, at, times

    def sigterm(self) -> None:
        for _ in range(self.times):
            os.kill(os.getpid(), signal.SIGTERM)

    def _now(self, run: Any, at: str) -> None:
        marker = Path(self.folder, f"fell-{run.rank}")
        if at == self.at and run.rank in self.ranks and not marker.exists():
            marker.touch()
            self.sigterm()

    def on_run_begin(self, run: Any) -> None:
        super().on_run_begin(run)
        self._now(run, "run")

    def on_step_end(self, run: Any) -> None:
        if run.step == FALL:
            self._now(run, "step")

    def on_validation_begin(self, run: Any) -> None:
        if run.epoch == 2:
            self._now(run, "validation")

    def on_epoch_end(self, run: Any, row: Any) -> None:
        if run.epoch == 2:
            self._now(run, "epoch")

    def on_run_end(self, run: Any) -> None:
        self._now(run, "end")


@pytest.mark.parametrize(
    ("options", "in_folder"),
    [
        pytest.param({"ranks": (0,)}, False, id="rank 0"),
        pytest.param({"ranks": (1,)}, False, id="rank 1"),
        pytest.param({"ranks": (1,)}, True, id="with checkpoints"),
        pytest.param({"ranks": (0, 1), "times": 2}, False, id="both, twice"),
        pytest.param({"at": "run"}, True, id="before the first step"),
        pytest.param({"at": "validation"}, True, id="in validation"),
        pytest.param({"at": "validation"}, False, id="in validation, without checkpoints"),
        pytest.param({"at": "epoch"}, False, id="between epochs"),
    ],
)
def test_a_run_whose_worker_gets_sigterm_goes_on_where_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: Any, options: dict[str, Any], in_folder: bool
) -> None:
    est = shaky(settings=RunSettings(max_failures=0))
    folder = tmp_path / "run" if in_folder else None

    history = fit(est, Terminated(tmp_path, **options), notes(tmp_path / "rows"), folder=folder)

    assert attempts(tmp_path) == [2, 2]
    assert times_trained(tmp_path / "rows") == ALL_STEPS
    assert figures(history) == whole[0]
    assert_same(est, whole[1])
    assert "was given notice (SIGTERM): the run " in caplog.text


def test_a_notice_after_the_last_step_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: Any
) -> None:
    est = shaky()

    history = fit(est, Terminated(tmp_path, ranks=(0, 1), at="end"))

    assert attempts(tmp_path) == [2]
    assert figures(history) == whole[0]
    assert_same(est, whole[1])
    assert caplog.text == ""


def test_a_worker_that_is_killed_before_its_step_ends_is_replaced(tmp_path: Path, whole: Any) -> None:
    est = shaky()

    class Slow(Terminated):
        """Its step takes longer than its notice: SIGKILL comes first."""

        def sigterm(self) -> None:
            super().sigterm()
            self.die()

    history = fit(est, Slow(tmp_path), folder=tmp_path / "run")

    # If the others have heard of the notice, they stop, and all begin again from the checkpoint.
    assert attempts(tmp_path) in ([2], [2, 2])
    assert figures(history) == whole[0]
    assert_same(est, whole[1])


def test_a_worker_that_starts_processes_can_still_end_them(tmp_path: Path) -> None:
    class Forks(Callback):
        def on_run_begin(self, run: Any) -> None:
            reading, writing = os.pipe()
            pid = os.fork()
            if not pid:
                os.write(writing, b"here")
                threading.Event().wait(60)
                os._exit(0)
            os.read(reading, 4)
            os.kill(pid, signal.SIGTERM)
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM

    fit(shaky(), Forks(), epochs=1)


@pytest.mark.parametrize("in_folder", [False, True])
def test_the_notice_of_a_machine_is_heard_once_though_it_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: Any, in_folder: bool
) -> None:
    est = shaky(settings=RunSettings(max_failures=0, notice=str(tmp_path / "notice")))
    folder = tmp_path / "run" if in_folder else None

    history = fit(est, Announces(tmp_path), notes(tmp_path / "rows"), folder=folder)

    assert attempts(tmp_path) == [2, 2]
    assert times_trained(tmp_path / "rows") == ALL_STEPS
    assert figures(history) == whole[0]
    assert_same(est, whole[1])
    assert f"was given notice ({tmp_path / 'notice'}): the run was saved after step" in caplog.text


class Announces(Falls):
    """Writes the notice of the machine, and makes slow steps until the run has heard of it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "announce", rank=0)

    def on_step_end(self, run: Any) -> None:
        if run.rank == 0 and run.step >= FALL and attempts(Path(self.folder)) == [2]:
            Path(self.folder, "notice").touch()
            threading.Event().wait(2.0)


class Large(nn.Module):
    """100 MB with the two moments of Adam."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(2900, 2900)
        self.out = nn.Linear(2900, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.wide(x)))


class Counts(Callback):
    """Notes each step in a file; rank 1 gets SIGTERM after the third."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def on_step_end(self, run: Any) -> None:
        with Path(self.folder, f"steps-{run.rank}").open("a") as file:
            file.write(f"{run.step}\n")
        marker = Path(self.folder, "noticed")
        if run.rank == 1 and run.step == 3 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("in_folder", [pytest.param(False, marks=whole_only), True])
def test_a_state_of_100_mb_moves_without_a_step_made_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, in_folder: bool
) -> None:
    rng = np.random.default_rng(0)
    data = (rng.normal(size=(48, 2900)).astype(np.float32), rng.normal(size=(48, 1)).astype(np.float32))

    def trained(*callbacks: Callback, **options: Any) -> Estimator:
        model = Large()
        est = Estimator.from_torch(
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
            loss=nn.MSELoss(),
            workers=2,
            engine="local",
            settings=RunSettings(max_failures=0),
        )
        est.fit(data, epochs=1, batch_size=8, callbacks=list(callbacks), verbose=0, **options)
        return est

    alone = trained()
    folder = {"checkpoint": tmp_path / "run"} if in_folder else {}
    est = trained(Counts(tmp_path), **folder)

    for rank in (0, 1):
        assert (tmp_path / f"steps-{rank}").read_text().split() == ["1", "2", "3", "4", "5", "6"]
    assert est.history["loss"] == alone.history["loss"]
    assert_same(est, weights(alone))
    assert "the run was saved after step " in caplog.text
    if in_folder:
        assert max(file.stat().st_size for file in (tmp_path / "run").iterdir()) > 100e6


def test_a_checkpoint_that_takes_longer_than_the_notice_is_said_once(tmp_path: Path) -> None:
    est = shaky(workers=1, settings=RunSettings(notice_s=1e-9))

    with pytest.warns(UserWarning, match="a checkpoint takes .* s to write, .* has 1e-09 s") as seen:
        fit(est, folder=tmp_path / "run", epochs=1)
    assert len([each for each in seen if "takes" in str(each.message)]) == 1


class TerminatesDriver(Falls):
    """Sends the driver SIGTERM in one step, which takes until all workers are asked to stop."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "terminate_driver")

    def terminate_driver(self) -> None:
        os.kill(self.driver, signal.SIGTERM)
        await_file(Path(self.folder), "asked")


@contextmanager
def marking(folder: Path) -> Iterator[None]:
    """Leave a file in the folder once a run has asked its workers to stop."""

    class Marks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "the workers stop after this step" in record.getMessage():
                (folder / "asked").touch()

    marks, log = Marks(), logging.getLogger("kindler.estimator.run")
    log.addHandler(marks)
    try:
        yield
    finally:
        log.removeHandler(marks)


PROGRAM = """
    import sys
    from pathlib import Path

    from interrupted import fit, notes, shaky
    from test_notices import TerminatesDriver, marking

    folder = Path(sys.argv[1])
    with marking(folder):
        fit(shaky(), TerminatesDriver(folder), notes(folder / "rows"), folder=folder / "run")
"""


def test_a_driver_that_gets_sigterm_saves_the_run_and_ends_by_it_and_another_goes_on(
    tmp_path: Path, whole: Any
) -> None:
    program = tmp_path / "program.py"
    program.write_text("\n".join(line[4:] for line in PROGRAM.splitlines()))
    parts = (str(ROOT / "src"), str(ROOT), str(ROOT / "tests/torch"))
    driver = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(parts)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert driver.returncode == -signal.SIGTERM, driver.stderr
    assert times_trained(tmp_path / "rows") == dict.fromkeys(range(1, FALL + 1), 1)

    again = shaky()
    history = fit(again, notes(tmp_path / "rows"), folder=tmp_path / "run", resume=True)

    assert times_trained(tmp_path / "rows") == ALL_STEPS
    assert figures(history) == whole[0]
    assert_same(again, whole[1])


def test_a_handler_of_the_users_own_is_called_once_the_run_is_saved(tmp_path: Path, whole: Any) -> None:
    saved: list[int] = []

    def handle(*_: object) -> None:
        saved.append(len(list((tmp_path / "run").glob(f"*-step-{FALL:09d}.kindler"))))

    before = signal.signal(signal.SIGTERM, handle)
    try:
        with marking(tmp_path), pytest.raises(KeyboardInterrupt, match=f"interrupted after step {FALL}"):
            fit(shaky(), TerminatesDriver(tmp_path), folder=tmp_path / "run")
        assert signal.getsignal(signal.SIGTERM) is handle
    finally:
        signal.signal(signal.SIGTERM, before)

    assert saved == [1]
    again = shaky()
    assert figures(fit(again, folder=tmp_path / "run", resume=True)) == whole[0]
    assert_same(again, whole[1])


class InterruptsToo(Terminated):
    """Presses Ctrl-C in the same step in which it gets SIGTERM."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.driver = os.getpid()

    def sigterm(self) -> None:
        super().sigterm()
        os.kill(self.driver, signal.SIGINT)
        await_file(Path(self.folder), "asked")


def test_an_interrupt_during_a_notice_ends_the_run_after_the_same_step(tmp_path: Path, whole: Any) -> None:
    est = shaky()

    with marking(tmp_path), pytest.raises(KeyboardInterrupt, match=f"interrupted after step {FALL}"):
        fit(est, InterruptsToo(tmp_path), folder=tmp_path / "run")

    assert attempts(tmp_path) == [2]
    again = shaky()
    assert figures(fit(again, folder=tmp_path / "run", resume=True)) == whole[0]
    assert_same(again, whole[1])
