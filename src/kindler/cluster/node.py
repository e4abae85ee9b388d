"""What runs on every node: it prepares the process for the user's program, runs it, and returns its value."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from typing import Any

import cloudpickle

from kindler.cluster.context import Context
from kindler.cluster.environment import variables
from kindler.cluster.feed_server import FeedServer
from kindler.cluster.gpus import assign_gpus
from kindler.cluster.roles import TRAINING
from kindler.engine.left_running import leave_running
from kindler.engine.worker import Worker
from kindler.errors import ConfigError, TrainingError, first_line


def run_node(worker: Worker, settings: bytes, program: bytes) -> list[bytes]:
    """The target of every rank.

    Args:
        worker: The node.
        settings: JSON: framework, gpus, default_fs.
        program: The function and its arguments. They are loaded last: importing the user's modules may import
            a framework, which must find its variables and GPUs.
    """
    chosen: dict[str, Any] = json.loads(settings)
    os.environ.update(variables(worker.members, worker.rank, chosen["framework"]))
    gpus = _gpus(worker, chosen["gpus"])
    server = FeedServer(worker, worker.ports[1]) if chosen["fed"] and worker.role in TRAINING else None
    if chosen["log_dir"] is not None and worker.rank == 0:
        _start_tensorboard(worker, chosen["log_dir"])
    ctx = Context(worker, server=server, gpus=gpus, default_fs=chosen["default_fs"])
    try:
        function, args = cloudpickle.loads(program)
        worker.report("ready")
        value = _called(function, args, ctx)
        ctx.check_answered()
    except BaseException as exc:
        if server is not None:
            server.close(f"{ctx.role} {ctx.task_index} failed:\n{_told(exc)}", failed=True)
        raise
    if server is not None:
        server.close("the program has returned")
    return [_packed(value)]


def _start_tensorboard(worker: Worker, log_dir: str) -> None:
    """It ends with this process, whose group it is in."""
    address = worker.members[worker.rank].outside_address
    words = ["--logdir", log_dir, "--host", address, "--port", str(worker.ports[-1])]
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    leave_running(process)


def _gpus(worker: Worker, wanted: int | None) -> tuple[str, ...]:
    computing = [m.rank for m in worker.members if m.host == worker.host and m.role != "ps"]
    if worker.role == "ps":
        return assign_gpus(0, position=0, nodes=1) or ()
    return assign_gpus(wanted, position=computing.index(worker.rank), nodes=len(computing)) or ()


def _called(function: Any, args: Any, ctx: Context) -> Any:
    if isinstance(args, list):
        name = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)
        sys.argv = [name or "main_fun", *map(str, args)]  # for libraries that read flags from there
    try:
        return function(args, ctx)
    except SystemExit as exc:
        if exc.code in (None, 0):
            return None
        raise TrainingError(
            f"the program of {ctx.role} {ctx.task_index} ended with sys.exit({exc.code!r})."
        ) from exc


def _told(exc: BaseException) -> str:
    return "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))


def _packed(value: Any) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as exc:
        raise ConfigError(
            f"what main_fun returned cannot be sent to the driver: {first_line(exc)}.\n"
            "Hint: return numbers, arrays or plain objects, and save models to files."
        ) from exc
    return data
