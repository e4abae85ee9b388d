"""The commands of TensorFlowOnSpark's ResNet example, with the program of `examples/resnet_cifar`.

The page starts Spark's own cluster with scripts that pip's Spark does not have. Here they do
nothing, and Spark runs already: `local[2]`, or with `KINDLER_TEST_WHOLE=1` a master and two workers.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyspark
import pytest

from kindler.spark.java import find_java
from tests.cluster.test_resnet_cifar import cifar as few_records
from tests.cluster.test_resnet_cifar import free_places, losses
from tests.conftest import SHARED
from tests.seeds.programs import runnable
from tests.seeds.table import ROWS
from tests.spark_programs.cluster import standalone
from tests.whole import WHOLE

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "resnet_cifar"

pytestmark = [pytest.mark.spark, pytest.mark.timeout(7200 if WHOLE else 600)]

__all__ = ["few_records"]


@pytest.fixture(scope="session")
def cifar(few_records: Path) -> Path:
    return SHARED / "cifar10-mini" if WHOLE else few_records


class Shell:
    """Starts commands of the page."""

    def __init__(self, folder: Path, cifar: Path) -> None:
        self.folder = folder
        first, second = free_places()
        self.places = {
            "cifar": str(cifar), "models": str(EXAMPLE), "tfos": str(folder / "tfos"),
            "first": first, "second": second, "master": "local[2]",
        }  # fmt: skip

    def start(self, text: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-eu", "-c", text],
            env={
                **os.environ,
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
                "PYTHONPATH": str(ROOT / "src"),
                "PYSPARK_PYTHON": sys.executable,
                "JAVA_HOME": str(find_java().home),
                "SPARK_HOME": str(self.folder / "spark"),
                "TENSORFLOW_MODELS": str(EXAMPLE),
                "CIFAR_DATA": self.places["cifar"],
                "TF_CPP_MIN_LOG_LEVEL": "2",
            },
            cwd=EXAMPLE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def block(self, name: str) -> str:
        return runnable(ROWS[name], self.folder, **self.places)


@pytest.fixture
def shell(cifar: Path, tmp_path: Path) -> Iterator[Shell]:
    spark = tmp_path / "spark"
    (spark / "sbin").mkdir(parents=True)
    for part in Path(pyspark.__file__).parent.iterdir():
        if part.name != "sbin":
            (spark / part.name).symlink_to(part)
    for script in ("start-master.sh", "start-slave.sh", "stop-slave.sh", "stop-master.sh"):
        (spark / "sbin" / script).write_text("#!/bin/sh\n")
        (spark / "sbin" / script).chmod(0o755)
    (tmp_path / "tfos" / "examples").mkdir(parents=True)
    (tmp_path / "tfos" / "examples" / "resnet").symlink_to(EXAMPLE)
    shell = Shell(tmp_path, cifar)
    with standalone(tmp_path) if WHOLE else nullcontext() as cluster:
        if cluster is not None:
            shell.places["master"] = cluster.address
        yield shell


def output_of(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate()
    assert process.returncode == 0, output[-4000:]
    return output


def judged(output: str) -> list[Any]:
    """The losses on the test set that were printed."""
    return re.findall(r"test loss ([\d.]+), accuracy [\d.]+", output)


def test_one_process_trains(shell: Shell) -> None:
    output = output_of(shell.start(shell.block("tensorflowonspark-resnet/single-node")))

    assert sum(map(len, losses(output).values())) > 0
    assert len(judged(output)) == 1


def test_two_processes_find_each_other_and_train_in_step(shell: Shell) -> None:
    both = shell.block("tensorflowonspark-resnet/two-processes")
    windows = both.split("# in another shell/window")

    first, second = map(output_of, [shell.start(window) for window in windows])

    assert losses(first) == losses(second)
    assert len(losses(first)[""]) > 0
    assert judged(first) == judged(second)


def test_two_executors_of_spark_train_in_step(shell: Shell) -> None:
    output = output_of(shell.start(shell.block("tensorflowonspark-resnet/spark")))

    first, second = losses(output).values()
    assert first == second
    assert len(first) > 0
    assert len(judged(output)) == 2
    assert len(set(judged(output))) == 1
