"""One Spark session for all tests of this process, with more slots than cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kindler
from tests.warm_daemon import CONF, PRELOAD

SLOTS = 4
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    # Executors must find the classes that test modules define.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        str(ROOT / part) for part in ("src", "packages/kindler-tfrecord/src", ".", "tests/spark")
    )
    os.environ[PRELOAD] = "torch,kindler.frameworks.torch.replica"
    files = (
        tmp_path_factory.getbasetemp() / "spark"
    )  # the same for tests/unit/with_spark: one session for both
    conf = {"spark.sql.shuffle.partitions": "4", "spark.local.dir": str(files), **CONF}
    yield kindler.init(cores=SLOTS, conf=conf)
    kindler.stop()


@pytest.fixture(scope="session", autouse=True)
def _environment_of_the_session(spark: Any) -> None:
    """The session sets variables for its executors; they are not a test's leak."""


@pytest.fixture
def partitioned(spark: Any) -> Callable[..., Any]:
    """A frame whose partitions hold exactly the rows given."""

    def made(partitions: Sequence[Sequence[tuple[Any, ...]]], schema: str) -> Any:
        parts = list(partitions)
        rows = spark.sparkContext.parallelize(range(len(parts)), len(parts)).flatMap(lambda i: parts[i])
        return spark.createDataFrame(rows, schema)

    return made
