"""The local engine: worker processes on this machine, started on demand and kept for the next tasks.

A process takes tasks of one family only (see `Kinds.family`), and best those of a model that it has in
memory. Threads exist while there are tasks.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from dataclasses import dataclass

from kindler.engine.local import slots
from kindler.errors import ConfigError, FrameError, TaskCancelledError, TaskTimeoutError, WorkerLost
from kindler.frame import ChannelClosed
from kindler.runtime.engine import Listener, Load
from kindler.runtime.messages import Report, Task, described
from kindler.runtime.processes import Loss, Process, start

_LABELS = ("default", "local")
_MOST_WORKERS = 4


@dataclass(slots=True, eq=False)
class _Job:
    task: Task
    listen: Listener
    process: Process | None = None
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
        self._store = store
        self._idle_s = idle_s
        self._answer_s = answer_s
        self._capacity = capacity
        self._trusted = trusted
        self._labels = labels
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._jobs: dict[str, _Job] = {}
        self._idle: list[Process] = []
        self._busy = 0
        self._runners: list[threading.Thread] = []
        self._closed = False

    def submit(self, task: Task, listen: Listener) -> None:
        """See `Engine`."""
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
        """See `Engine`."""
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
            job.listen(_cancelled(job.task))

    def close(self) -> None:
        """See `Engine`."""
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
        """See `Engine`."""
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
        task, loss = job.task, Loss("never started", 0, "")
        try:
            for _ in range(task.max_retries + 1):
                last = self._once(job)
                if isinstance(last, Report):
                    return last
                loss = last
        except Exception as exc:  # noqa: BLE001 - the edge of a task: it must not be lost with this thread
            return Report("failed", error=described(exc))
        again = f"; {task} was started {task.max_retries + 1} times" if task.max_retries else ""
        lost = WorkerLost(
            loss.reason + again,
            rank=None,
            host=socket.gethostname(),
            exit_code=loss.exit_code,
            log_tail=loss.log_tail,
        )
        return Report("failed", error=described(lost), log=loss.log_tail)

    def _once(self, job: _Job) -> Report | Loss:
        """One attempt; a loss counts only if the process had started the task."""
        task = job.task
        while True:
            process = self._acquire(task)
            with self._lock:
                job.process = process
            if job.cancelled:
                self._release(job, process)
                return _cancelled(task)
            try:
                return self._answer(job, process)
            except ChannelClosed:
                with self._lock:
                    job.process = None
                if job.cancelled:
                    process.end()
                    return _cancelled(task)
                fresh = process.family == ""
                loss = process.loss()
                if job.running or fresh:
                    return loss
                # It had ended, or was stopped, before the task was sent.

    def _answer(self, job: _Job, process: Process) -> Report:
        task, job.running = job.task, False
        process.send(task)
        report = self._confirmed(process)
        if report.state == "running":
            job.running = True
            process.family = task.family or process.family or "any"
            process.models.add(f"{task.bucket}/{task.name}")
            job.listen(report)
            try:
                report = self._ending(process, time.monotonic() + task.timeout_s)
            except TimeoutError:
                with self._lock:
                    job.process = None
                process.end()
                late = TaskTimeoutError(task=str(task), waited_s=task.timeout_s, goes_on=False)
                return Report("failed", error=described(late))
        self._release(job, process)
        return report

    def _confirmed(self, process: Process) -> Report:
        """The first report. A process that is stopped gives none, and would keep its task for ever."""
        try:
            return _report(process, self._answer_s)
        except TimeoutError:
            process.kill(f"did not confirm its task in {self._answer_s:g} s")
            raise ChannelClosed("no answer") from None

    def _ending(self, process: Process, deadline: float) -> Report:
        """The last report; raises TimeoutError after the deadline, and ChannelClosed if it is stopped."""
        was_stopped = False
        while (left := deadline - time.monotonic()) > 0:
            try:
                return _report(process, min(left, self._answer_s))
            except TimeoutError:
                is_stopped = process.is_stopped
                if is_stopped and was_stopped:
                    process.kill(f"was stopped for {self._answer_s:g} s")
                    raise ChannelClosed("stopped") from None
                was_stopped = is_stopped
        raise TimeoutError

    def _acquire(self, task: Task) -> Process:
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
        return start(self._store, idle_s=self._idle_s, capacity=self._capacity, trusted=self._trusted)

    def _release(self, job: _Job, process: Process) -> None:
        with self._lock:
            job.process = None
            if not self._closed:
                self._idle.append(process)
                return
        process.end()


def _report(process: Process, timeout_s: float) -> Report:
    try:
        return Report.read(process.channel.receive(timeout_s))[1]
    except FrameError as exc:
        raise ChannelClosed(str(exc)) from exc


def _cancelled(task: Task) -> Report:
    return Report("cancelled", error=described(TaskCancelledError(f"{task} was cancelled.")))
