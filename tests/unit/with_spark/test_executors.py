"""Executors are asked what they have before a worker starts there."""

from __future__ import annotations

import socket
import sys
import threading
from typing import Any

import pytest
from torch import nn

import kindler
from kindler import Estimator, limits
from kindler.errors import ConfigError
from kindler.spark import executors
from kindler.spark.executors import ExecutorPython, Polling, check_executors, executor_pythons

pytestmark = pytest.mark.spark


@pytest.fixture
def like_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver does not take its own Python for that of the executors."""
    monkeypatch.setattr(executors, "_is_this_python", lambda spark: False)
    executors._answers.clear()


def jobs(spark: Any) -> int:
    return len(spark.sparkContext.statusTracker().getJobIdsForGroup(None))


def test_on_this_machine_nothing_is_asked(spark: Any) -> None:
    before = jobs(spark)

    check_executors(spark, "torch", "no_such_package")

    assert jobs(spark) == before


@pytest.mark.usefixtures("like_a_cluster")
def test_executors_say_what_they_have_once_and_what_is_missing_is_said_with_its_host(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = jobs(spark)
    (found,) = executor_pythons(spark, (*executors._ALWAYS, "torch"))
    check_executors(spark, "torch")
    check_executors(spark, "torch", "no_such_package")  # which this process lacks, too: nobody needs it

    assert jobs(spark) == before + 1
    assert (found.host, found.python) == (socket.gethostname(), sys.version.split()[0])
    assert found.versions["kindler"] == kindler.__version__
    assert found.versions["torch"]
    assert found.free_temp
    monkeypatch.setattr(executors, "find_spec", lambda name: object())
    with pytest.raises(ConfigError) as caught:
        check_executors(spark, "no_such_package")
    assert f"  {socket.gethostname()} (" in str(caught.value)
    assert "): no_such_package is not installed\nHint: " in str(caught.value)


@pytest.mark.usefixtures("like_a_cluster")
def test_a_run_is_refused_before_a_worker_starts(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = ExecutorPython("node-2", "/usr/bin/python3", "3.11.2", dict.fromkeys(("kindler", "torch")))
    monkeypatch.setattr(executors, "executor_pythons", lambda spark, packages: [lacking])
    monkeypatch.setattr("kindler.spark.engine.run", lambda *args, **options: pytest.fail("it has started"))
    model = Estimator.from_torch(model=nn.Linear(1, 1), optimizer=None, loss=nn.MSELoss(), workers=1)
    frame = spark.range(3).selectExpr("float(id) AS x", "float(id) AS y")

    for call in (lambda: model.evaluate(frame), lambda: model.predict(frame)):
        with pytest.raises(
            ConfigError, match=r"node-2 .*: kindler is not installed; .*torch is not installed"
        ):
            call()


def test_another_version_of_kindler_is_refused() -> None:
    versions = dict.fromkeys(("kindler", "numpy"), "0.0.1")

    complaints = ExecutorPython("node-2", "python", "3.11.2", versions).complaints(["kindler", "numpy"])

    assert complaints == [f"kindler is 0.0.1, and {kindler.__version__} on the driver"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "Lost task 0.3 (TID 3) (10.0.0.5 executor 1): Python in worker has different version: 3.10",
            r"executors on 10\.0\.0\.5 must run Python \d\.\d+, as this program does: Python in worker has",
        ),
        (
            '(TID 3) (10.0.0.6 executor 2): Cannot run program "/opt/py/bin/python": error=2, No file\n at',
            r'on 10\.0\.0\.6 cannot start Python: Cannot run program "/opt/py/bin/python"',
        ),
    ],
)
def test_a_python_that_cannot_run_there_is_named(text: str, message: str) -> None:
    error = executors._cannot_start(text)

    assert error is not None
    with pytest.raises(ConfigError, match=message):
        raise error
    assert executors._cannot_start("Job aborted: out of memory") is None


def test_a_session_that_never_answers_does_not_hold_what_polls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers = threading.Event(), threading.Event()

    class Hangs(Polling):
        def look(self) -> None:
            asked.set()
            answers.wait()

    monkeypatch.setattr(limits, "CLOSE_S", 0.01)
    polling = Hangs("test-polling", every_s=0.0)
    with polling:
        assert asked.wait(30)

    assert polling.is_alive()
    answers.set()
    polling.join(30)
    assert not polling.is_alive()


def test_what_is_polled_is_looked_at_until_it_says_that_it_is_over() -> None:
    looks: list[int] = []

    class Counts(Polling):
        def look(self) -> bool:
            looks.append(len(looks))
            if len(looks) == 2:
                raise OSError("executors come and go")
            return len(looks) < 3

    with Counts("test-polling", every_s=0.0) as polling:
        polling.join(30)

    assert looks == [0, 1, 2]
