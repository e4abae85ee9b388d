"""What happens when a run goes wrong on the local engine: one clear error, and nothing left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from kindler import Columns, Estimator, RunSettings
from kindler.callbacks import Callback
from kindler.errors import (
    ConfigError,
    DataError,
    MissingExtraError,
    SyncTimeoutError,
    WorkerError,
    WorkerLostError,
)
from tests.conftest import eventually_none, fork_servers, workers
from tests.whole import whole_only

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

X = np.linspace(0, 1, 64, dtype=np.float32).reshape(32, 2)
Y = X.sum(1)
ROOT = Path(__file__).parents[2]
FATAL = RunSettings(max_failures=0)  # lost workers are not replaced


def regression(**options: Any) -> Estimator:
    model = nn.Linear(2, 1)
    options = {"workers": 2, "loss": nn.MSELoss(), **options}
    return Estimator.from_torch(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), **options)


class OnRankOne(Callback):
    """Does something on rank 1 after its third step."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_step_end(self, run: Any) -> None:
        if run.rank == 1 and run.step == 3:
            print("rank one is at step three")  # noqa: T201
            getattr(self, self.what)()

    def boom(self) -> None:
        raise ValueError("boom")

    def die(self) -> None:
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def own(self) -> None:
        raise MyError(3)


class MyError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")


def test_the_users_own_exception_comes_first_with_rank_host_and_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    est = regression()

    with pytest.raises(ValueError, match="^boom") as caught:
        est.fit((X, Y), epochs=2, batch_size=4, callbacks=[OnRankOne("boom")], verbose=0)

    assert isinstance(caught.value, WorkerError)
    assert caught.value.rank == 1
    assert caught.value.host == os.uname().nodename
    assert 'raise ValueError("boom")' in str(caught.value)
    assert f"worker 1, host {caught.value.host}" in str(caught.value)
    assert not eventually_none(workers)
    assert capfd.readouterr().err == ""

    assert len(est.fit((X, Y), epochs=1, batch_size=4, verbose=0)) == 1, "the next fit works"


def test_an_exception_class_of_the_users_own_is_caught_as_itself() -> None:
    with pytest.raises(MyError, match="^code 3"):
        regression().fit((X, Y), epochs=2, batch_size=4, callbacks=[OnRankOne("own")], verbose=0)


def test_a_killed_worker_is_reported_lost_with_its_last_lines() -> None:
    with pytest.raises(WorkerLostError, match="SIGKILL") as caught:
        regression(settings=FATAL).fit(
            (X, Y), epochs=2, batch_size=4, callbacks=[OnRankOne("die")], verbose=0
        )

    assert (caught.value.rank, caught.value.exit_code) == (1, -9)
    assert "rank one is at step three" in caught.value.log_tail
    assert "rank one is at step three" in str(caught.value)


def test_a_killed_worker_is_reported_lost_over_the_network_too() -> None:
    est = regression(settings=replace(FATAL, shared_memory=False))

    with pytest.raises(WorkerLostError, match="worker 1") as caught:
        est.fit((X, Y), epochs=2, batch_size=4, callbacks=[OnRankOne("die")], verbose=0)

    assert caught.value.rank == 1


class Stuck(Callback):
    """Rank 1 stops itself like a machine that hangs: no step, no sign of life."""

    def on_step_end(self, run: Any) -> None:
        if run.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)


def test_a_worker_that_gives_no_sign_of_life_is_ended_and_named() -> None:
    est = regression(settings=replace(FATAL, heartbeat_s=0.2, heartbeat_timeout_s=2.0))

    with pytest.raises(WorkerLostError, match="worker 1 .*no sign of life for 2 s"):
        est.fit((X, Y), epochs=2, batch_size=4, callbacks=[Stuck()], verbose=0)


class Holds(Callback):
    """Rank 1 is in native code that keeps the interpreter's lock for longer than signs of life may fail."""

    def on_step_end(self, run: Any) -> None:
        if run.rank == 1 and run.step == 1:
            ctypes.PyDLL(None).sleep(3)


def test_a_worker_whose_native_code_holds_the_interpreter_is_not_lost() -> None:
    est = regression(settings=RunSettings(heartbeat_s=0.2, heartbeat_timeout_s=1.0))

    history = est.fit((X, Y), epochs=1, batch_size=16, callbacks=[Holds()], verbose=0)

    assert history["steps"] == [2]


class Waits(Callback):
    """Rank 1 never comes to the next exchange; `stopped` like a process that hangs."""

    def __init__(self, folder: Path, *, stopped: bool) -> None:
        self.folder, self.stopped = str(folder), stopped

    def on_run_begin(self, run: Any) -> None:
        if run.rank == 0:
            with Path(self.folder, "attempts").open("a") as file:
                file.write("1")

    def on_step_end(self, run: Any) -> None:
        if run.rank != 1 or (self.stopped and len(Path(self.folder, "attempts").read_text()) > 1):
            return
        if self.stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()


def test_ranks_that_never_come_to_an_exchange_are_named_and_the_run_is_not_tried_again(
    tmp_path: Path,
) -> None:
    settings = RunSettings(sync_timeout_s=6.0, retry_backoff_s=0.01)
    est, waits = regression(settings=settings), [Waits(tmp_path, stopped=False)]

    with pytest.raises(SyncTimeoutError, match=r"1 of 2 workers: \[1\] did not arrive") as caught:
        est.fit((X, Y), 2, 4, callbacks=waits, checkpoint=tmp_path / "run", verbose=0)

    assert caught.value.missing == (1,)
    assert (tmp_path / "attempts").read_text() == "1"


def test_an_exchange_that_waited_in_vain_for_a_stopped_worker_is_tried_again(tmp_path: Path) -> None:
    settings = RunSettings(sync_timeout_s=6.0, retry_backoff_s=0.01)
    est, waits = regression(settings=settings), [Waits(tmp_path, stopped=True)]

    history = est.fit((X, Y), 2, 4, callbacks=waits, checkpoint=tmp_path / "run", verbose=0)

    assert history["steps"] == [8, 8]
    assert (tmp_path / "attempts").read_text() == "11"


def test_nan_and_null_and_ragged_rows_name_column_and_row() -> None:
    x = X.copy()
    x[7, 1] = np.nan
    with pytest.raises(DataError, match="column 'x', row 7: .*NaN"):
        regression().fit((x, Y), verbose=0)

    import pyarrow as pa

    for rows, word in (([[1.0], None, [2.0]], "null"), ([[1.0], [2.0, 3.0], [4.0]], "2")):
        table = pa.table({"x": pa.array(rows, pa.list_(pa.float32())), "y": [1.0, 2.0, 3.0]})
        with pytest.raises(DataError, match=f"column 'x', row 1: .*{word}"):
            regression().fit(table, verbose=0)


def test_all_wrong_arguments_are_named_at_once_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="(?s)epochs.*received 0.*batch_size.*received -1.*ingest"):
        regression().fit((X, Y), epochs=0, batch_size=-1, columns=Columns(ingest="fast"))  # type: ignore[arg-type]
    for nothing, kind in ((3, "int"), (None, "NoneType")):
        with pytest.raises(ConfigError, match=f"data is a builtins.{kind}"):
            regression().fit(nothing)
    with pytest.raises(ConfigError, match=r"optimizer=\.\.\."):
        Estimator.from_torch(model=nn.Linear(2, 1), loss=nn.MSELoss()).fit((X, Y))
    with pytest.raises(ConfigError, match="workers must be at least 1.*received 0"):
        regression(workers=0)


def test_a_missing_framework_is_named_with_the_extra_that_brings_it(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    code = """
        from kindler import Estimator
        from kindler.errors import MissingExtraError
        try:
            Estimator.from_torch(model=print)
        except MissingExtraError as exc:
            print(exc.extra, exc)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.stdout.startswith("torch "), done.stderr
    assert "pip install 'kindler[torch]'" in done.stdout
    assert issubclass(MissingExtraError, ImportError)


PROGRAM = """
    import numpy as np, torch, os, time
    from torch import nn
    from kindler import Estimator
    from kindler.callbacks import Callback

    class Long(Callback):
        def on_step_end(self, run):
            if run.rank == 0 and run.step == 3:
                open({ready!r}, "w").close()
            time.sleep(0.05)

    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    est = Estimator.from_torch(model=model, optimizer=sgd, loss=nn.MSELoss(), workers=2)
    x = np.ones((640, 2), np.float32)
    try:
        est.fit((x, x.sum(1)), epochs=1000, batch_size=4, callbacks=[Long()], verbose=0)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def left_in(temporary: Path) -> list[Path]:
    """Files besides the empty ones that processes of this user find each other by."""
    found = [p for p in temporary.rglob("*") if "owner-" not in str(p)]
    return [p for p in found if p.is_file() and p.stat().st_size]


# Nothing of Kindler hears of SIGTERM, as of SIGKILL.
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=whole_only), signal.SIGKILL]
)
def test_interrupting_or_killing_the_driver_leaves_no_process_and_no_file(
    tmp_path: Path, number: signal.Signals
) -> None:
    ready, temporary = tmp_path / "ready", tmp_path / "tmp"
    temporary.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM.format(ready=str(ready)))],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 240
    while not ready.exists() and driver.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    mine = psutil.Process(driver.pid).children(recursive=True)
    assert len(mine) == 3, "a fork server and two workers"

    driver.send_signal(number)
    out, _ = driver.communicate(timeout=120)

    assert ("interrupted" in out) == (number is signal.SIGINT)
    assert not eventually_none(lambda: [p for p in mine if p.is_running()])
    assert not eventually_none(lambda: left_in(temporary))


def test_runs_after_a_good_one_and_after_a_failed_one_get_fresh_forks_of_the_same_warm_process() -> None:
    regression(settings=RunSettings(idle_s=0)).fit((X, Y), verbose=0)  # ends those of other tests
    assert not eventually_none(fork_servers)
    seen: list[tuple[int, int]] = []

    for callbacks in ([], [OnRankOne("boom")], []):
        with pytest.raises(ValueError, match="boom") if callbacks else nullcontext():
            regression().fit((X, Y), batch_size=4, callbacks=callbacks, verbose=0)
        seen += [(p.pid, len(workers())) for p in fork_servers()]

    assert len({pid for pid, _ in seen}) == 1
    assert {count for _, count in seen} == {0}
    # Arrow is imported there too, and a fork has no other thread than the one that forks.
    assert [p.num_threads() for p in fork_servers()] == [1]
