"""The commands of TensorFlowOnSpark's ResNet example, with the program of `examples/resnet_cifar`.

The page starts Spark's own cluster with scripts that pip's Spark does not have. They are short, and start a
master and two workers with what pip's Spark has.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

from kindler.spark.java import find_java
from tests.checkout import PYTHONPATH, ROOT
from tests.conftest import SHARED, eventually_none
from tests.java_options import JAVA_OPTIONS
from tests.seeds.programs import runnable
from tests.seeds.table import ROWS
from tests.tensorflowonspark.test_resnet_cifar import cifar as few_records
from tests.tensorflowonspark.test_resnet_cifar import free_places, losses
from tests.whole import WHOLE

EXAMPLE = ROOT / "examples" / "resnet_cifar"

pytestmark = [pytest.mark.spark, pytest.mark.timeout(7200 if WHOLE else 600)]

__all__ = ["few_records"]


@pytest.fixture(scope="session")
def cifar(few_records: Path) -> Path:
    return SHARED / "cifar10-mini" if WHOLE else few_records


MASTER, WORKER = (f"org.apache.spark.deploy.{name}" for name in ("master.Master", "worker.Worker"))
DAEMON = """#!/bin/bash
for number in $(seq %s); do "$SPARK_HOME/sbin/spark-daemon.sh" %s $number %s; done
"""
EVERY_WORKER = "${SPARK_WORKER_INSTANCES:-1}"
SCRIPTS = {
    "start-master.sh": ("1", f"start {MASTER}", "--host 127.0.0.1 --port $MASTER_PORT --webui-port 0"),
    "start-slave.sh": (EVERY_WORKER, f"start {WORKER}", '--host 127.0.0.1 --webui-port 0 "$@"'),
    "stop-slave.sh": (EVERY_WORKER, f"stop {WORKER}", ""),
    "stop-master.sh": ("1", f"stop {MASTER}", ""),
}


class Shell:
    """Starts commands of the page."""

    def __init__(self, folder: Path, cifar: Path) -> None:
        self.folder = folder
        first, second, master = (*free_places(), free_places()[0].replace("localhost", "127.0.0.1"))
        self.places = {
            "cifar": str(cifar), "models": str(EXAMPLE), "tfos": str(folder / "tfos"),
            "first": first, "second": second, "master": master,
        }  # fmt: skip
        self._given = {
            "CIFAR_DATA": str(cifar),
            "PYTHONPATH": PYTHONPATH,
            "SPARK_HOME": str(folder / "spark"),
            "TENSORFLOW_MODELS": str(EXAMPLE),
        }

    def start(self, name: str, part: slice = slice(None)) -> subprocess.Popen[str]:
        """Run a block, or some of the windows that it has commands for."""
        row = ROWS[name]
        windows = runnable(row, self.folder, **self.places).split("# in another shell/window")
        return subprocess.Popen(
            ["bash", "-eu", "-c", "\n".join(windows[part])],
            env={
                **{variable: value for variable, value in os.environ.items() if variable not in self._given},
                **{variable: self._given[variable] for variable in row.given_names if "." not in variable},
                **self._of_this_machine(),
            },
            cwd=EXAMPLE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _of_this_machine(self) -> dict[str, str]:
        """Where Python and Java are, and what Spark's daemons of this test have for themselves."""
        return {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYSPARK_PYTHON": sys.executable,
            "JAVA_HOME": str(find_java().home),
            "JAVA_TOOL_OPTIONS": JAVA_OPTIONS,
            "MASTER_PORT": self.places["master"].rpartition(":")[2],
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_PID_DIR": str(self.folder / "pids"),
            "SPARK_LOG_DIR": str(self.folder / "logs"),
            "SPARK_WORKER_DIR": str(self.folder / "work"),
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }

    def daemons(self) -> list[int]:
        """The processes of Spark's cluster that run."""
        numbers = [int(file.read_text()) for file in (self.folder / "pids").glob("*.pid")]
        return [number for number in numbers if Path(f"/proc/{number}").exists()]


@pytest.fixture
def shell(cifar: Path, tmp_path: Path) -> Iterator[Shell]:
    spark = tmp_path / "spark"
    (spark / "sbin").mkdir(parents=True)
    for part in Path(pyspark.__file__).parent.iterdir():
        if part.name != "sbin":
            (spark / part.name).symlink_to(part)
    for part in (Path(pyspark.__file__).parent / "sbin").iterdir():
        (spark / "sbin" / part.name).symlink_to(part)
    for script, words in SCRIPTS.items():
        (spark / "sbin" / script).write_text(DAEMON % words)
        (spark / "sbin" / script).chmod(0o755)
    (tmp_path / "tfos" / "examples").mkdir(parents=True)
    (tmp_path / "tfos" / "examples" / "resnet").symlink_to(EXAMPLE)
    shell = Shell(tmp_path, cifar)
    yield shell
    for number in shell.daemons():  # of commands that failed before the last of them
        os.kill(number, signal.SIGTERM)


def output_of(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate()
    assert process.returncode == 0, output[-4000:]
    return output


def judged(output: str) -> list[Any]:
    """The losses on the test set that were printed."""
    return re.findall(r"test loss ([\d.]+), accuracy [\d.]+", output)


def test_one_process_trains(shell: Shell) -> None:
    output = output_of(shell.start("tensorflowonspark-resnet/single-node"))

    assert sum(map(len, losses(output).values())) > 0
    assert len(judged(output)) == 1


def test_two_processes_find_each_other_and_train_in_step(shell: Shell) -> None:
    name = "tensorflowonspark-resnet/two-processes"

    first, second = map(output_of, [shell.start(name, slice(0, 1)), shell.start(name, slice(1, 2))])

    assert losses(first) == losses(second)
    assert len(losses(first)[""]) > 0
    assert judged(first) == judged(second)


def test_two_executors_of_spark_train_in_step(shell: Shell) -> None:
    output = output_of(shell.start("tensorflowonspark-resnet/spark"))

    first, second = losses(output).values()
    assert first == second
    assert len(first) > 0
    assert len(judged(output)) == 2
    assert len(set(judged(output))) == 1
    logs = [path.read_text() for path in (shell.folder / "logs").iterdir()]
    assert sum("Successfully registered with master" in log for log in logs) == 2
    assert not eventually_none(shell.daemons)
