"""One Spark session for all programs of this process; it starts where relative paths are meant to be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kindler
from tests.checkout import PYTHONPATH
from tests.conftest import SHARED
from tests.warm import _warm
from tests.warm_daemon import CONF
from tests.whole import WHOLE

__all__ = ["_warm"]

if WHOLE and not (SHARED / "mnist").is_dir():
    pytest.skip(f"MNIST is not at {SHARED / 'mnist'}", allow_module_level=True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where programs run."""
    return tmp_path_factory.mktemp("seeds")


def _stand_in(folder: Path, session: Any) -> None:
    """Paths that are not absolute begin there for Spark too, which other tests may have started elsewhere."""
    hadoop = session.sparkContext._jvm.org.apache.hadoop.fs
    files = hadoop.FileSystem.get(session.sparkContext._jsc.hadoopConfiguration())
    files.setWorkingDirectory(hadoop.Path(str(folder)))


@pytest.fixture(scope="session")
def spark(folder: Path) -> Iterator[Any]:
    before, here = dict(os.environ), Path.cwd()
    os.environ["PYTHONPATH"] = PYTHONPATH
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.chdir(folder)
    session = kindler.init(master="local[2]", conf={"spark.sql.shuffle.partitions": "2", **CONF})
    _stand_in(folder, session)
    yield session
    kindler.stop()
    os.chdir(here)
    os.environ.clear()
    os.environ.update(before)
