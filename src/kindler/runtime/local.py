"""The local engine: worker processes on this machine, started on demand and kept for the next tasks.

A process takes tasks of one family only (see `Kinds.family`), and best those of a model that it has in
memory. It is forked from a fork server (see `kindler.engine.fork_server`) that has imported what every task
needs, and dies with its owner, whatever happens to it. Threads exist while there are tasks.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kindler.engine import fork_server
from kindler.engine.local import slots
from kindler.engine.placement import program_path
from kindler.engine.wire import Channel
from kindler.errors import (
    ConfigError,
    FrameError,
    StartTimeoutError,
    TaskCancelledError,
    TaskTimeoutError,
    WorkerLostError,
)
from kindler.frame import ChannelClosed, Frame
from kindler.runtime.engine import Listener, Load
from kindler.runtime.messages import Report, Task
from kindler.temporary import Folder

_LABELS = ("default", "local")
_MOST_WORKERS = 4
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0
_LOG_BYTES = 1 << 20
_TAIL_LINES = 40
_RECIPE = fork_server.Recipe(preload=("kindler.runtime.executor", "kindler.store.catalog"))
_ENTRY = "kindler.runtime.executor:main"


class Log:
    """The output of a worker process, in a file of a folder: nobody reads a pipe while there are no tasks."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "log"

    def take_over(self) -> None:
        """Redirect this process's output to the log."""
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(file, number)
        os.close(file)

    def begin(self) -> None:
        """A task begins."""
        _flush()
        os.truncate(self._path, 0)

    def tail(self) -> str:
        """The last lines since the task began."""
        _flush()
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, self._path.stat().st_size - _LOG_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_TAIL_LINES:])


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def send_frame(channel: Channel, frame: Frame) -> None:
    channel.send(frame.kind, *frame.buffers, **frame.fields)


class _Process:
    """A worker process, seen from its owner. `family` is what it computes with, empty before its first task;
    `models` is what it has in memory, most likely."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.family = ""
        self.models: set[str] = set()
        self.is_killed = False
        self._why = ""
        self._folder = Folder("kindler-runtime-")
        try:
            self._child = fork_server.start_child(
                _RECIPE, owner=os.getpid(), timeout_s=_START_TIMEOUT_S, entry=_ENTRY
            )
        except BaseException:
            self._folder.remove()
            raise
        self._channel = self._child.channel
        try:
            self._channel.send("start", folder=str(self._folder.path), sys_path=program_path(), **order)
            self._channel.receive(_START_TIMEOUT_S)
        except (TimeoutError, ChannelClosed) as exc:
            log = self._log()
            self.end()
            raise StartTimeoutError(f"a worker of the runtime did not start: {exc}.\n{log}") from exc

    def send(self, task: Task) -> None:
        send_frame(self._channel, task.frame())

    def report(self, timeout_s: float) -> Report:
        """The next report; raises TimeoutError, and ChannelClosed if the process is gone."""
        try:
            return Report.read(self._channel.receive(timeout_s))[1]
        except FrameError as exc:
            raise ChannelClosed(str(exc)) from exc

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal, as far as this system tells; such a process does not end."""
        try:
            stat = Path(f"/proc/{self._child.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def kill(self, why: str = "") -> None:
        """End it now, with every process it started; `why` is the reason that `loss` gives."""
        self._why, self.is_killed = why, True
        self._child.kill()

    def loss(self) -> tuple[str, int, str]:
        """Why it is gone, its exit code and its last output, once its channel is closed."""
        try:
            code, _ = self._child.wait(_STOP_TIMEOUT_S)
        except TimeoutError:
            code = -signal.SIGKILL  # `end` sees to it
        log = self._log()
        if self._why:
            return f"its process {self._why}", code, log
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}", code, log
        return f"its process ended with exit code {code} before it had a result", code, log

    def end(self) -> None:
        """End it, and remove what it had."""
        self._channel.close()
        self._child.kill()
        try:
            self._child.wait(_STOP_TIMEOUT_S)
        except TimeoutError:
            pass  # closing its leash ends it, whatever it does
        self._child.close()
        self._folder.remove()

    def _log(self) -> str:
        return Log(self._folder.path).tail()


@dataclass(slots=True, eq=False)
class _Job:
    task: Task
    listen: Listener
    process: _Process | None = None
    cancelled: bool = False
    running: bool = False


class LocalEngine:
    """Runs tasks on processes of this machine. See `Engine`.

    Args:
        store: The store's URL.
        workers: The largest number of processes; None is one per core, at most four.
        idle_s: Seconds without a task after which a process ends.
        answer_s: Seconds in which a process must confirm a task, and after which a stopped one is replaced.
        capacity: The number of models that a process keeps in memory.
        trusted: Whether tasks that request it may run code of the store.
        labels: The labels of tasks that may run here.
    """

    def __init__(
        self,
        store: str,
        *,
        workers: int | None = None,
        idle_s: float = 300.0,
        answer_s: float = 15.0,
        capacity: int = 4,
        trusted: bool = True,
        labels: tuple[str, ...] = _LABELS,
    ) -> None:
        self.workers = workers or min(_MOST_WORKERS, slots())
        self._order = {"store": store, "idle_s": idle_s, "capacity": capacity, "trusted": trusted}
        self._answer_s = answer_s
        self._labels = labels
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._jobs: dict[str, _Job] = {}
        self._idle: list[_Process] = []
        self._busy = 0
        self._runners: list[threading.Thread] = []
        self._closed = False

    def submit(self, task: Task, listen: Listener) -> None:
        if task.label not in self._labels:
            raise ConfigError(
                f"no local worker has the label {task.label!r}; available: {', '.join(self._labels)}.\n"
                f"Hint: with a broker (KINDLER_BROKER), `kindler worker --label {task.label}` starts one."
            )
        job = _Job(task, listen)
        with self._lock:
            if self._closed:
                raise TaskCancelledError("the runtime is closed.")
            self._jobs[task.id] = job
            self._waiting.append(job)
            self._runners = [thread for thread in self._runners if thread.is_alive()]
            if self._busy < self.workers:
                self._busy += 1
                runner = threading.Thread(target=self._work, name="kindler-runtime", daemon=True)
                self._runners.append(runner)
                runner.start()

    def cancel(self, task_id: str) -> None:
        with self._lock:
            job = self._jobs.get(task_id)
            if job is None or job.cancelled:
                return
            job.cancelled = True
            queued = job in self._waiting
            if queued:
                self._waiting.remove(job)
                del self._jobs[task_id]
            elif job.process is not None:
                job.process.kill()
        if queued:
            job.listen(Report.cancelled(f"{job.task} was cancelled."))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            names = list(self._jobs)
        for name in names:
            self.cancel(name)
        for runner in list(self._runners):
            if runner is not threading.current_thread():
                runner.join(30.0)
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def load(self) -> Load:
        with self._lock:
            waiting = len(self._waiting)
            busy = len(self._jobs) - waiting
            return Load(engine="local", workers=self.workers, busy=busy, waiting=waiting)

    def _work(self) -> None:
        """A runner thread: runs tasks as long as some wait."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy -= 1
                    return
                job = self._waiting.popleft()
            report = self._ended(job)
            with self._lock:
                self._jobs.pop(job.task.id, None)
            job.listen(report)

    def _ended(self, job: _Job) -> Report:
        """Run a job to its end, with retries on other processes."""
        task, reason, code, log = job.task, "it was never started", 0, ""
        try:
            for _ in range(task.max_retries + 1):
                attempt = self._once(job)
                if isinstance(attempt, Report):
                    return attempt
                reason, code, log = attempt
        except Exception as exc:  # noqa: BLE001 - the edge of a task: it must not be lost with this thread
            return Report.failed(exc)
        again = f"; {task} was started {task.max_retries + 1} times" if task.max_retries else ""
        host = socket.gethostname()
        return Report.failed(
            WorkerLostError(reason + again, rank=None, host=host, exit_code=code, log_tail=log), log
        )

    def _once(self, job: _Job) -> Report | tuple[str, int, str]:
        """One attempt: the last report, or how its process was lost after it had started the task."""
        cancelled = Report.cancelled(f"{job.task} was cancelled.")
        while True:
            job.running = False
            loss: tuple[str, int, str] | None = None
            process = self._acquire(job.task)
            with self._lock:
                job.process = process
            is_fresh = process.family == ""
            try:
                report = cancelled if job.cancelled else self._answer(job, process)
            except ChannelClosed:
                report, loss = cancelled, None if job.cancelled else process.loss()
            with self._lock:
                job.process = None
                if is_kept := not (self._closed or process.is_killed or loss):
                    self._idle.append(process)
            if not is_kept:
                process.end()
            if loss is None:
                return report
            if job.running or is_fresh:
                return loss
            # It had ended, or was stopped, before the task was sent.

    def _answer(self, job: _Job, process: _Process) -> Report:
        """The last report. A process that a signal has stopped gives none, and would keep its task for ever:
        it is killed. Raises ChannelClosed if the process is gone."""
        task, deadline, was_stopped = job.task, math.inf, False
        process.send(task)
        while True:
            try:
                report = process.report(min(self._answer_s, max(0.0, deadline - time.monotonic())))
            except TimeoutError:
                is_stopped = process.is_stopped
                if not job.running:
                    process.kill(f"did not confirm its task in {self._answer_s:g} s")
                elif is_stopped and was_stopped:
                    process.kill(f"was stopped for {self._answer_s:g} s")
                elif time.monotonic() >= deadline:
                    process.kill("exceeded its time limit")
                    late = TaskTimeoutError(task=str(task), waited_s=task.timeout_s, goes_on=False)
                    return Report.failed(late)
                else:
                    was_stopped = is_stopped
                    continue
                raise ChannelClosed("it is stopped") from None
            if report.state != "running":
                return report
            job.running, deadline = True, time.monotonic() + task.timeout_s
            process.family = task.family or process.family or "any"
            process.models.add(f"{task.bucket}/{task.name}")
            job.listen(report)

    def _acquire(self, task: Task) -> _Process:
        """An idle process of the task's family, or a new one in place of an idle one of another family."""
        name, surplus = f"{task.bucket}/{task.name}", None
        with self._lock:
            fitting = [process for process in self._idle if process.family in ("", "any", task.family)]
            if fitting:
                best = max(fitting, key=lambda process: name in process.models)
                self._idle.remove(best)
                return best
            in_use = sum(job.process is not None for job in self._jobs.values())
            if self._idle and in_use + len(self._idle) >= self.workers:
                surplus = self._idle.pop(0)
        if surplus is not None:
            surplus.end()
        return _Process(self._order)
