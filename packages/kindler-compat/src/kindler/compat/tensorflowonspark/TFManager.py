"""Queues and values of one node in a process of their own, for programs and tests that make one themselves.

Clusters of Kindler do not use it: their rows come in blocks, straight from the tasks. `ctx.mgr` of a node has
the same names; see `TFNodeContext`.
"""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Sequence
from multiprocessing.managers import BaseManager, DictProxy
from typing import Any

_queues: dict[str, queue.Queue[Any]] = {}  # in the manager's own process
_values: dict[str, Any] = {}


def _fill(names: Sequence[str]) -> None:
    _queues.update((name, queue.Queue()) for name in names)
    _values["queues"] = tuple(names)


def _queue(name: str) -> queue.Queue[Any]:
    return _queues[name]


def _table() -> dict[str, Any]:
    return _values


class TFManager(BaseManager):
    def get_queue(self, name: str) -> Any:
        """A queue by its name; None where there is none."""
        served: Any = self
        return served._queue(name) if name in self.get("queues") else None

    def get(self, key: str) -> Any:
        served: Any = self
        return served._table().get(key)

    def set(self, key: str, value: Any) -> None:
        served: Any = self
        served._table().update({key: value})


TFManager.register("_queue", callable=_queue)
TFManager.register("_table", callable=_table, proxytype=DictProxy)


def start(authkey: bytes, queues: Sequence[str], mode: str = "local") -> TFManager:
    """Start a manager with these queues; "local" to this machine, or "remote" for others of the network."""
    # Not "spawn": that would run the user's program again.
    context: Any = multiprocessing.get_context("fork")
    manager = TFManager(("", 0) if mode == "remote" else None, authkey=bytes(authkey), ctx=context)
    manager.start(_fill, (tuple(queues),))
    return manager


def connect(address: Any, authkey: bytes) -> TFManager:
    manager = TFManager(address, authkey=bytes(authkey))
    manager.connect()
    return manager
