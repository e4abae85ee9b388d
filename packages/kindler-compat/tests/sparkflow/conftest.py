"""One Spark session for all tests of SparkFlow's interface, which train graphs of TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kindler
from tests.checkout import PYTHONPATH
from tests.warm_daemon import CONF, PRELOAD

os.environ.setdefault(PRELOAD, "tensorflow")


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    os.environ["PYTHONPATH"] = os.pathsep.join((PYTHONPATH, str(Path(__file__).parent)))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    yield kindler.init(cores=2, conf={"spark.sql.shuffle.partitions": "2", **CONF})
    kindler.stop()


@pytest.fixture(scope="session", autouse=True)
def _environment_of_the_session(spark: Any) -> None:
    """The session sets variables for its executors; they are not a test's leak."""
