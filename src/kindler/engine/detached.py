"""A supervisor in a process of its own, which outlives the Spark task that starts it.

A rank that is fed by Spark jobs must not hold the slots those jobs need, so the task ends once this process
has joined the gang. The process ends with its worker or with the driver; the worker also ends with the
executor, whose Python daemon owns its fork server.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kindler.engine import fork_server
from kindler.engine.job import Job
from kindler.engine.supervisor import AbortedError, Supervisor
from kindler.engine.wire import Address, connect
from kindler.engine.worker import describe
from kindler.errors import TrainingError

_MODULE = "kindler.engine.detached"
_JOINED = {"joined": True}


@dataclass(frozen=True, kw_only=True)
class Order:
    """`python_path` is PYTHONPATH: with another value, no warm fork server on the machine would match."""

    job: Job
    rank: int
    hub: Address
    owner: int
    base: Path | None = None
    cargo: bool = False
    sys_path: tuple[str, ...] = field(default_factory=lambda: tuple(p for p in sys.path if p))
    python_path: str | None = field(default_factory=lambda: os.environ.get("PYTHONPATH"))


def start(order: Order) -> None:
    """Start the process; return once its supervisor has joined the others, or raise TrainingError."""
    process = subprocess.Popen(
        [sys.executable, "-m", _MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # signals to the group of Spark's Python workers are not for it
        env={**os.environ, **fork_server.package_path()},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as inlet, process.stdout as outlet:
        try:
            inlet.write(pickle.dumps(order))
            inlet.close()
            line = outlet.readline()
        except OSError as exc:
            raise TrainingError(f"the process that supervises a worker did not start: {exc}.") from exc
    answer: dict[str, Any] = json.loads(line) if line else {"message": "it ended without a message"}
    if answer != _JOINED:
        process.wait()
        raise TrainingError(f"worker {order.rank} did not join the others: {answer['message']}")
    fork_server.leave_running(process)


def main() -> None:
    order: Order = pickle.loads(sys.stdin.buffer.read())
    sys.path.extend(path for path in order.sys_path if path not in sys.path)
    if order.python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = order.python_path
    job = order.job
    try:
        presence = connect(order.hub, job.secret, timeout_s=job.settings.start_timeout_s)
    except Exception as exc:  # noqa: BLE001 - the task says it
        _say(describe(exc))
        return
    try:
        presence.send("attend", rank=order.rank)
        _look_after(order)
    finally:
        presence.close()  # the driver knows by this that nothing of the rank is left


def _look_after(order: Order) -> None:
    try:
        with Supervisor(
            order.job,
            order.rank,
            hub=order.hub,
            owner=order.owner,
            base=order.base,
            far=True,
            cargo=order.cargo,
        ) as supervisor:
            supervisor.start()
            _say(_JOINED)
            supervisor.run()
    except AbortedError:
        pass
    except Exception as exc:  # noqa: BLE001 - the task says it
        _say(describe(exc))


def _say(answer: Mapping[str, Any]) -> None:
    """Answer the task, which reads a single line; later answers go nowhere."""
    try:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    except OSError:
        pass
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
