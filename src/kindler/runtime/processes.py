"""One process that runs tasks, seen from its owner: how it is started, spoken to and ended.

It is forked from a fork server (see `kindler.engine.fork_server`) that has imported what every task needs,
and dies with its owner, whatever happens to it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kindler.config import RunSettings
from kindler.engine import fork_server
from kindler.engine.job import Job, equal_ranks
from kindler.engine.supervisor import worker_fields
from kindler.engine.wire import Channel, accept
from kindler.errors import StartTimeoutError
from kindler.frame import ChannelClosed
from kindler.runtime.logs import Log
from kindler.runtime.messages import Task
from kindler.temporary import Folder

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0
_NEVER_S = 1e6  # tasks have their own time limit; nobody listens for signs of life between them
_SETTINGS = RunSettings(
    heartbeat_s=_NEVER_S,
    heartbeat_timeout_s=4 * _NEVER_S,
    stall_timeout_s=4 * _NEVER_S,
    sync_timeout_s=_NEVER_S,
)
_TARGET = "kindler.runtime.worker:serve"


@dataclass(frozen=True, slots=True)
class Loss:
    """How a process ended that was not asked to.

    Attributes:
        reason: In words.
        exit_code: Its exit code; negative is a signal's number.
        log_tail: The last lines it printed.
    """

    reason: str
    exit_code: int
    log_tail: str


class Process:
    """A worker process.

    Attributes:
        pid: Its number.
        family: What it computes with; empty before its first task.
        models: What it has in memory, most likely.
        channel: Tasks there, reports back.
    """

    def __init__(self, child: fork_server.Child, channel: Channel, folder: Folder) -> None:
        self.pid = child.pid
        self.family = ""
        self.models: set[str] = set()
        self.channel = channel
        self._child = child
        self._folder = folder
        self._why = ""

    def send(self, task: Task) -> None:
        """Hand over a task.

        Raises:
            ChannelClosed: It is gone.
        """
        frame = task.frame()
        self.channel.send(frame.kind, *frame.buffers, **frame.fields)

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal, as far as this system tells; such a process does not end."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def kill(self, why: str = "") -> None:
        """End it now, with every process it started; `why` is the reason that `loss` gives."""
        self._why = why
        self._child.kill()

    def loss(self) -> Loss:
        """Why it is gone, once its channel is closed; and ends what is left of it."""
        try:
            code, _ = self._child.wait(_STOP_TIMEOUT_S)
        except TimeoutError:
            code = -signal.SIGKILL  # `end` sees to it
        said = Log(self._folder.path).tail()
        self.end()
        why = (
            f"its process {self._why}"
            if self._why
            else f"its process was ended by {signal.Signals(-code).name}"
            if code < 0
            else f"its process ended with exit code {code} before it had a result"
        )
        return Loss(why, code, said)

    def end(self) -> None:
        """End it, and remove what it had."""
        self.channel.close()
        self._child.kill()
        try:
            self._child.wait(_STOP_TIMEOUT_S)
        except TimeoutError:
            pass  # closing its leash ends it, whatever it does
        self._child.close()
        self._folder.remove()


def start(store: str, *, idle_s: float, capacity: int, trusted: bool) -> Process:
    """Start a process.

    Args:
        store: The URL of the store that its tasks are about.
        idle_s: Seconds without a task after which it ends.
        capacity: How many models it keeps in memory.
        trusted: Whether it runs code of the store for tasks that ask for it.

    Raises:
        StartTimeoutError: It did not come up.
    """
    job = Job(ranks=equal_ranks(_TARGET, 1), run_id="runtime", settings=_SETTINGS)
    recipe = fork_server.Recipe(preload=("kindler.runtime.worker", "kindler.store.catalog"))
    with ExitStack() as undo, socket.create_server(("127.0.0.1", 0)) as listener:
        folder = Folder("kindler-runtime-")
        undo.callback(folder.remove)
        scratch = folder.path
        child = fork_server.start_child(
            recipe,
            owner=os.getpid(),
            timeout_s=_START_TIMEOUT_S,
        )
        undo.callback(child.close)
        order = {
            "store": store,
            "port": listener.getsockname()[1],
            "idle_s": idle_s,
            "capacity": capacity,
            "trusted": trusted,
        }
        try:
            fields = worker_fields(job, 0, scratch=scratch)
            child.channel.send("job", json.dumps(order).encode(), **fields)
            listener.settimeout(_START_TIMEOUT_S)
            accepted, _ = listener.accept()
            channel = accept(accepted, job.secret, timeout_s=_START_TIMEOUT_S)
        except (OSError, ChannelClosed) as exc:
            raise StartTimeoutError(
                f"a worker of the runtime did not come up: {exc}.\n{Log(scratch).tail()}"
            ) from exc
        undo.pop_all()
    return Process(child, channel, folder)
