"""The nodes of a cluster, and what runs on each: it prepares the process, and runs the user's program."""

from __future__ import annotations

import fcntl
import json
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import cloudpickle

from kindler.cluster.context import TRAINING, Context, variables
from kindler.cluster.feed_server import FeedServer
from kindler.engine.fork_server import leave_running
from kindler.engine.job import RankSpec
from kindler.engine.placement import VISIBLE_GPUS, ask_driver, gpus_of_task, machine_gpus
from kindler.engine.worker import Worker
from kindler.errors import ConfigError, TrainingError, first_line
from kindler.temporary import private_folder


def ranks(
    *,
    workers: int,
    ps: int,
    chief: bool,
    evaluator: bool,
    until: str,
    evaluator_grace_s: float,
    fed: bool,
    tensorboard: bool,
) -> tuple[RankSpec, ...]:
    """Training nodes come first, the chief before all, so that ranks equal worker numbers.

    The first port is the program's, the second the feed's, and the first node's last TensorBoard's.
    """
    for name, value, least in (("workers", workers, 1), ("ps", ps, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name}={value!r}: {name} must be a whole number, {least} or more.")
    if until not in ("workers", "chief"):
        raise ConfigError(f"until={until!r}: must be 'workers' or 'chief'.")
    if until == "chief" and not chief:
        raise ConfigError("until='chief' needs chief=True.")
    grace_s = evaluator_grace_s
    if isinstance(grace_s, bool) or not isinstance(grace_s, (int, float)) or not 0 <= grace_s < math.inf:
        raise ConfigError(f"evaluator_grace_s={grace_s!r}: must be a number of seconds, 0 or more.")
    training = ("chief",) * chief + ("worker",) * (workers - chief)
    roles = (*training, *("ps",) * ps, *("evaluator",) * evaluator)
    return tuple(
        RankSpec(
            target="kindler.cluster.node:run_node",
            role=role,
            ports=1 + (fed and role in TRAINING) + (tensorboard and rank == 0),
            service=role not in TRAINING or (until == "chief" and role != "chief"),
            grace_s=grace_s if role == "evaluator" else 0.0,
        )
        for rank, role in enumerate(roles)
    )


def run_node(worker: Worker, settings: bytes, program: bytes) -> list[bytes]:
    """The target of every rank; `settings` is JSON, `program` the pickled function and its arguments.

    The program is unpickled last: its modules may import a framework, which must find its variables and GPUs.
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
            text = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
            server.close(f"{ctx.role} {ctx.task_index} failed:\n{text}", failed=True)
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


def _packed(value: Any) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as exc:
        raise ConfigError(
            f"what main_fun returned cannot be sent to the driver: {first_line(exc)}.\n"
            "Hint: return numbers, arrays or plain objects, and save models to files."
        ) from exc
    return data


_claims: list[IO[str]] = []  # of this process


def assign_gpus(wanted: int | None, *, position: int, nodes: int) -> tuple[str, ...] | None:
    """Set this process's visible GPUs before a framework looks for them; None if nothing was set.

    Those that Spark gave to the task, else free ones that it claims by locking a file for the life of the
    process, so that nodes never share a GPU by accident.
    """
    assigned = tuple(gpus_of_task())
    chosen: Sequence[str]
    if assigned:
        chosen = assigned if wanted is None else assigned[:wanted]
    elif wanted == 0:
        chosen = ()
    else:
        all_here = machine_gpus()
        if not all_here and wanted is None:
            return None
        count = wanted if wanted is not None else max(1, len(all_here) // nodes)
        free = free_gpus(all_here)
        start = position * count % max(1, len(free))  # nodes that start at once do not all try the same one
        chosen = claim([*free[start:], *free[:start]], count)
    if wanted is not None and len(chosen) < wanted:
        raise ConfigError(
            f"gpus={wanted} for each node, but {len(chosen)} were free for this node.\n"
            "Hint: run fewer nodes on a machine, or pass gpus=None to use the GPUs there are."
        )
    os.environ[VISIBLE_GPUS] = ",".join(chosen)
    return tuple(chosen)


def free_gpus(gpus: Sequence[str]) -> list[str]:
    uuids = {number.strip(): uuid.strip() for number, _, uuid in _pairs(ask_driver("--query-gpu=index,uuid"))}
    busy = {uuid.strip() for uuid, _, _ in _pairs(ask_driver("--query-compute-apps=gpu_uuid,pid"))}
    return [number for number in gpus if uuids.get(number, number) not in busy]


def claim(gpus: Sequence[str], count: int, folder: Path | None = None) -> list[str]:
    """Claim up to `count` GPUs that no other process has claimed, until this process ends."""
    place = folder or private_folder()
    chosen: list[str] = []
    for number in gpus:
        if len(chosen) == count:
            break
        lock = (place / f"gpu-{number.replace('/', '_')}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        _claims.append(lock)
        chosen.append(number)
    return chosen


def _pairs(lines: Sequence[str]) -> list[tuple[str, str, str]]:
    return [line.partition(",") for line in lines]
