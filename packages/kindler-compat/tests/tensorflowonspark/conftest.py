"""One Spark session for all tests of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

import kindler
from tests.checkout import PYTHONPATH
from tests.warm import _warm
from tests.warm_daemon import CONF

__all__ = ["_warm"]


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """Two slots: clusters of two nodes leave none free."""
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = PYTHONPATH
    yield kindler.init(master="local[2]", conf={"spark.sql.shuffle.partitions": "2", **CONF})
    kindler.stop()
    os.environ.clear()
    os.environ.update(before)
