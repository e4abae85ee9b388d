"""One Spark session with two slots for all tests of this process: clusters of two nodes leave none free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kindler
from tests.warm import _warm
from tests.warm_daemon import CONF

__all__ = ["_warm"]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in ("src", "."))
    yield kindler.init(master="local[2]", conf={"spark.sql.shuffle.partitions": "2", **CONF})
    kindler.stop()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
