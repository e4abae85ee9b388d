"""Programs with a Spark driver of their own; those that can share one run in turn in one process.

No session runs in the process of the tests. A group of programs runs once, for the first test that asks what
they printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SHARED
from tests.in_turn import Printed, run_in_turn
from tests.spark_programs.cluster import Cluster, standalone
from tests.warm_daemon import PRELOAD
from tests.whole import WHOLE, whole_only

MNIST = SHARED / "mnist"
PROGRAMS = Path(__file__).parent / "programs"
UNIT = Path(__file__).parents[1] / "unit" / "with_spark"
EXAMPLES = Path(__file__).parents[2] / "examples"
MNIST_SIZE = "whole" if WHOLE else "small"
TORCH = {PRELOAD: "torch,kindler.frameworks.torch.replica"}  # what Spark's workers inherit


def run_programs(folder: Path, *programs: Sequence[object], **options: Any) -> Printed:
    """Run files of `programs/`, or paths, in one process; gives what each printed, by its name."""
    return run_in_turn(folder, *((PROGRAMS / str(name), *words) for name, *words in programs), **options)


def last_line(printed: str) -> Any:
    """The value that a program printed last, as JSON."""
    return json.loads(printed.splitlines()[-1])


@pytest.fixture(scope="session")
def through_connect(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    folder = tmp_path_factory.mktemp("connect")
    for name in ("frames", "records", "stages"):
        (folder / name).mkdir()
    return run_programs(
        folder,
        ("connect.py", folder / "frames"),
        (UNIT / "parts_on_connect.py", folder / "frames"),
        ("tfrecord_connect.py", folder / "records"),
        ("shards.py", "connect"),
        ("shards_estimator.py", "connect"),
        ("ml_connect.py", folder / "stages"),
        ("connect_session.py",),  # which ends it
        warm=True,
        SPARK_TESTING="1",  # a free port for the server instead of Connect's fixed one
        **TORCH,
    )


def older_spark(version: str) -> Path:
    """Where another pyspark is installed beside the newest one."""
    place = Path(sys.prefix) / f"spark-{version}"
    if not place.is_dir():
        pytest.skip(f"pyspark {version} is not installed at {place} (make test does it)")
    return place


@pytest.fixture(scope="session", params=["3.5", pytest.param("4.0", marks=whole_only)])
def on_an_older_spark(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Printed]:
    version: str = request.param
    folder = tmp_path_factory.mktemp(f"spark-{version}")
    programs = [("versions.py", folder), ("shards.py", "classic")]
    return version, run_programs(folder, *programs, paths=[older_spark(version)], warm=True, **TORCH)


@pytest.fixture(scope="session")
def connect_on_4_0(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """pip's pyspark 4.0 has a server; that of 3.5 has none."""
    folder = tmp_path_factory.mktemp("connect-4.0")
    return run_programs(
        folder, ("versions.py", folder, "connect"), paths=[older_spark("4.0")], SPARK_TESTING="1"
    )


@pytest.fixture(scope="session")
def keras_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs of `keras_on_two_slots` run."""
    return tmp_path_factory.mktemp("keras")


@pytest.fixture(scope="session")
def keras_on_two_slots(keras_folder: Path) -> Printed:
    mnist = on_mnist("mnist_keras.py", "tensorflow", "local[2]", MNIST, keras_folder, MNIST_SIZE)
    return run_programs(
        keras_folder,
        (EXAMPLES / "first_steps_keras.py",),  # which knows of no session: it runs before there is one
        ("keras_frame.py", "tensorflow", keras_folder),
        ("ml_keras.py", keras_folder),
        ("orca_xshards_keras.py",),
        (EXAMPLES / "keras_digits.py", "--backend", "tensorflow"),
        (EXAMPLES / "keras_text.py",),
        *on_mnist("orca_keras.py", MNIST),
        *(mnist if WHOLE else ()),
        warm=True,
        KERAS_BACKEND="tensorflow",
        **{PRELOAD: "tensorflow"},
    )


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A master with two workers."""
    with standalone(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def torch_on_the_cluster(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Printed:
    folder = tmp_path_factory.mktemp("torch-cluster")
    printed = run_programs(
        folder,
        *(on_mnist("mnist.py", cluster.address, MNIST, folder, MNIST_SIZE) if WHOLE else ()),
        ("recovery.py", cluster.address, folder),
        quiet=False,  # Spark tells of the executors that are killed
    )
    cluster.mend()  # one of its workers was killed
    return printed


def on_mnist(*words: object) -> list[tuple[object, ...]]:
    """The program, where MNIST is; tests of it are skipped where it is not."""
    return [words] if MNIST.is_dir() else []
