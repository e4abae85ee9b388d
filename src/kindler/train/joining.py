"""Where a replica, a sync and the worker that carries both meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from kindler.group import Group
from kindler.sync.contract import Sync
from kindler.sync.registry import SYNCS, servers_of
from kindler.train.task import Task

LOOPS = {"step": "kindler.train.loop:run", "fit": "kindler.train.fit_loop:run"}
"""What workers run, by `FrameworkSpec.loop`."""

SERVER = "kindler.train.server:run"
"""What parameter servers run."""


@contextmanager
def joined(worker: Group, task: Task, replica: Any, *, ends_at: int | None) -> Iterator[Sync]:
    """Join the replicas of all workers while the block runs; one alone needs no sync but the default.

    Args:
        worker: This worker.
        task: The run.
        replica: Its replica.
        ends_at: The step after which the run ends.
    """
    config = task.training.sync
    alone = worker.size == 1 and not servers_of(config)
    name, options = ("allreduce", {}) if alone else (config.name, config.options)
    with closing(SYNCS.load(name)(task.settings, **options)) as sync:
        sync.ends_at = ends_at
        sync.attach(replica, worker)
        yield sync
