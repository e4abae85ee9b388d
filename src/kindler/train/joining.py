"""Where a replica, a sync and the worker that carries both meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from kindler.sync.contract import Sync
from kindler.sync.registry import SYNCS
from kindler.train.run_start import Worker
from kindler.train.task import Task

__all__ = ["LOOPS", "joined"]

LOOPS = {"step": "kindler.train.loop:run", "fit": "kindler.train.fit_loop:run"}
"""What workers run, by `FrameworkSpec.loop`."""


@contextmanager
def joined(worker: Worker, task: Task, replica: Any) -> Iterator[Sync]:
    """Join the replicas of all workers while the block runs; one alone needs no sync but the default."""
    config = task.training.sync
    name, options = (config.name, config.options) if worker.size > 1 else ("allreduce", {})
    with closing(SYNCS.load(name)(task.settings, **options)) as sync:
        sync.attach(replica, worker)
        yield sync
