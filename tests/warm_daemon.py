"""Spark's Python daemon for tests: its workers inherit what each would import.

Spark forks a worker for each task that finds none idle, and has each import pandas, Arrow and what the task
needs, PyTorch for one: seconds a worker. After every task it collects garbage, which takes the longer the
more is imported. Here the daemon imports all of it once, and leaves it out of that. Spark has a daemon for
each kind of task: a framework is worth importing there only where many workers use it.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys

__all__ = ["CONF", "PRELOAD", "environment"]

PRELOAD = "KINDLER_TEST_PRELOAD"  # modules, with commas between them
CONF = {
    "spark.python.daemon.module": "tests.warm_daemon",
    "spark.sql.codegen.wholeStage": "false",  # for a few rows each, compiling costs more than it saves
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
_ALWAYS = ("pyspark.worker", "pandas", "pyarrow.parquet", "kindler.spark.engine", "kindler.spark.predict")


def environment() -> dict[str, str]:
    """Variables with which a program has this daemon; its Python must find `tests`."""
    settings = " ".join(f"--conf {name}={value}" for name, value in CONF.items())
    return {"PYSPARK_SUBMIT_ARGS": f"{settings} pyspark-shell"}


def _preload() -> None:
    from kindler.engine.fork_server import _quiet_threads

    quiet = _quiet_threads()
    before = {name: os.environ.get(name) for name in quiet}
    os.environ.update(quiet)
    for name in (*_ALWAYS, *filter(None, os.environ.get(PRELOAD, "").split(","))):
        importlib.import_module(name)
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    gc.collect()
    gc.freeze()


def _leave_zip_files() -> None:
    """Import pyspark from where it is installed: its zip file has no byte code, and is read many times."""
    sys.path[:] = [path for path in sys.path if not path.endswith(".zip") or "pyspark" not in path]


if __name__ == "__main__":
    _leave_zip_files()
    from pyspark import daemon

    _preload()
    daemon.manager()
