"""A parameter server of an asynchronous run, on a rank of the role "ps": the model, and who may call it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import cloudpickle

from kindler.frameworks.registry import FRAMEWORKS
from kindler.group import Group
from kindler.sync.parameter_server import ParameterServer
from kindler.train.task import Task


def run(worker: Group, task_bytes: bytes, spec: bytes, *states: bytes) -> Sequence[bytes]:
    """Serve until the workers are done and this rank is stopped; what the server starts from comes from them.

    Raises:
        Exception: An update failed; what the framework's optimizer raised.
    """
    tempfile.tempdir = str(worker.scratch)
    task: Task = cloudpickle.loads(task_bytes)
    replica = FRAMEWORKS.load(task.framework).from_bytes(
        spec, device="cpu", seed=task.seed, threads=worker.threads
    )
    options = task.training.sync.options
    server = ParameterServer(
        replica, lock=bool(options.get("lock", False)), max_staleness=options.get("max_staleness")
    )
    worker.answer_calls(server.serve, server.check)
    return []
