"""One Spark session for all programs of this process; it starts where relative paths are meant to be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kindler
from tests.conftest import SHARED
from tests.warm import _warm, cold
from tests.warm_daemon import CONF
from tests.whole import WHOLE

__all__ = ["_warm", "cold"]

ROOT = Path(__file__).parents[2]

if WHOLE and not (SHARED / "mnist").is_dir():
    pytest.skip(f"MNIST is not at {SHARED / 'mnist'}", allow_module_level=True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where programs run."""
    return tmp_path_factory.mktemp("seeds")


@pytest.fixture(scope="session")
def spark(folder: Path) -> Iterator[Any]:
    before, here = dict(os.environ), Path.cwd()
    os.environ["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in ("src", "."))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.chdir(folder)
    yield kindler.init(master="local[2]", conf={"spark.sql.shuffle.partitions": "2", **CONF})
    kindler.stop()
    os.chdir(here)
    os.environ.clear()
    os.environ.update(before)
