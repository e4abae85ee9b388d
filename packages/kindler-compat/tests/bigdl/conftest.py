"""What all tests with BigDL's layers share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.checkout import PYTHONPATH
from tests.warm import _warm
from tests.warm_daemon import CONF

__all__ = ["_warm"]


@pytest.fixture(scope="session")
def sc() -> Iterator[Any]:
    """A Spark context, for test_spark_*.py, which come last: with it, everything runs on Spark."""
    from kindler.compat.zoo.orca import init_orca_context, stop_orca_context

    before = dict(os.environ)
    os.environ["PYTHONPATH"] = PYTHONPATH
    yield init_orca_context(cluster_mode="local", cores=2, memory="1g", conf=CONF)
    stop_orca_context()
    os.environ.clear()
    os.environ.update(before)
