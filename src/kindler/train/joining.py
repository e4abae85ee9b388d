"""Where workers meet: replicas that a sync joins, and parameter servers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import cloudpickle

from kindler.frameworks.registry import FRAMEWORKS
from kindler.group import Group
from kindler.sync.contract import Sync
from kindler.sync.registry import SYNCS, servers_of
from kindler.train.options import Task

LOOPS = {"step": "kindler.train.loop:run", "fit": "kindler.train.fit_loop:run"}
"""What workers run, by `FrameworkSpec.loop`."""

SERVER = "kindler.train.joining:run_server"
"""What parameter servers run."""


@contextmanager
def joined(worker: Group, task: Task, replica: Any, *, ends_at: int | None) -> Iterator[Sync]:
    """Join the replicas of all workers while the block runs; a single one needs only the default sync."""
    config = task.training.sync
    alone = worker.size == 1 and not servers_of(config)
    name, options = ("allreduce", {}) if alone else (config.name, config.options)
    with closing(SYNCS.load(name)(task.config.settings, **options)) as sync:
        sync.ends_at = ends_at
        sync.attach(replica, worker)
        yield sync


def run_server(worker: Group, task_bytes: bytes, spec: bytes, *states: bytes) -> Sequence[bytes]:
    """Serve the parameters of an asynchronous run on a rank of the role "ps", until the workers are done."""
    from kindler.sync.parameter_server import ParameterServer

    tempfile.tempdir = str(worker.scratch)
    task: Task = cloudpickle.loads(task_bytes)
    replica = FRAMEWORKS.load(task.framework).from_bytes(
        spec, device="cpu", seed=task.config.seed, threads=worker.threads
    )
    options = task.training.sync.options
    server = ParameterServer(
        replica, lock=bool(options.get("lock", False)), max_staleness=options.get("max_staleness")
    )
    worker.answer_calls(server.serve, server.check)
    return []
