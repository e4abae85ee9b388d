"""What other processes do to a store in the tests."""

from __future__ import annotations

import itertools
import multiprocessing
from typing import Any

import numpy as np

from kindler import Store

__all__ = ["append", "processes", "publish", "publish_many", "publish_without_end"]


def processes() -> Any:
    """Quick to start, and forked from a process without threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "tests.store.jobs",
            "kindler.store.catalog",
            "kindler.shelves._arrays",
            "psycopg",
            "obstore.store",
        ]
    )
    return context


def publish(url: str, mark: int, start: Any) -> None:
    om = Store(url)
    start.wait(60)
    om.datasets.put({"mark": mark}, "one", mode="replace", tag=f"of-{mark}")


def append(url: str, mark: int, start: Any) -> None:
    om = Store(url)
    start.wait(60)
    om.datasets.put(np.full((10, 2), mark), "rows", mode="append")


def publish_many(url: str, mark: int, count: int) -> None:
    om = Store(url)
    for i in range(count):
        # Half of it is the same for all, and comes and goes: sweeps and writers meet over its blob.
        om.datasets.put([mark if i % 2 else 0, i], f"of/{mark}", mode="replace")
        if i % 3 == 2:
            om.datasets.drop(f"of/{mark}@{i}", force=True)


def publish_without_end(url: str, seed: int, begun: Any) -> None:
    om = Store(url)
    random = np.random.default_rng(seed)
    for i in itertools.count():
        array = random.random((random.integers(1, 2000), 8))
        if i == 1:
            begun.send(True)  # all is imported and open; from now on, any moment is a moment of a put
        om.datasets.put(array, f"name/{random.integers(3)}", mode="append", attributes={"added": array.sum()})
