"""The processes of one version of a model: as many as are needed, started again when one is lost.

There is one from the beginning. Another is started while requests wait longer than a moment and none is
free, up to a limit; those that have nothing to do end after a while, the last one excepted. A process that
crashes, hangs or takes too much memory is replaced, after a pause that grows if that happens again and again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from kindler.sandbox.memory import Parts
from kindler.sandbox.process import Done, ProcessLost, Reply, SandboxProcess
from kindler.serve.http_errors import Problem
from kindler.serve.model_process import DescribedModel

_log = logging.getLogger("kindler.serve")
_LOOK_S = 1.0  # between two looks for processes with nothing to do
_IDLE_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONGEST_RETRY_S = 0.1, 5.0, 300.0
_FORGIVEN_S = 30.0  # without a loss
_TRIED = 3  # starts that failed one after the other: the model is down

Lost: TypeAlias = Callable[[SandboxProcess, ProcessLost], None]
Starter: TypeAlias = Callable[[Lost], Awaitable[tuple[SandboxProcess, DescribedModel]]]


class ModelPool:
    """Processes that have the same model.

    Args:
        name: For the log.
        start: Starts a process that has loaded the model.
        most: How many there may be.

    Attributes:
        when_free: Is called when a process has become free that was not before.
        when_lost: Is told of every process that was lost, and is replaced.
    """

    def __init__(self, name: str, start: Starter, *, most: int) -> None:
        self._name = name
        self._start = start
        self._most = most
        self._processes: dict[SandboxProcess, int] = {}  # and what each has of its GPU's memory
        self._free: list[tuple[SandboxProcess, float]] = []  # and since when; the one used last is used first
        self._starting: set[asyncio.Task[None]] = set()
        self._closed = False
        self._losses = self._failures = 0
        self._last_loss = 0.0
        self._pause: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self.when_free: Callable[[], None] = lambda: None
        self.when_lost: Callable[[ProcessLost], None] = lambda why: None

    async def open(self) -> DescribedModel:
        """Start the first process.

        Raises:
            Exception: What `start` raises.
        """
        model = await self._started()
        self._look_later()
        return model

    @property
    def free(self) -> int:
        """How many calls could begin now."""
        return len(self._free)

    @property
    def slots(self) -> int:
        """How many calls run at a time."""
        return max(1, len(self._processes))

    @property
    def is_down(self) -> bool:
        """Whether there is no process, and several tries to start one have failed."""
        return not self._processes and self._failures >= _TRIED

    @property
    def own_bytes(self) -> int:
        """What its processes have in memory for themselves."""
        return sum(process.own_bytes() for process in self._processes)

    @property
    def device_bytes(self) -> int:
        """What its processes have of their GPU's memory."""
        return sum(self._processes.values())

    def call(self, parts: Parts, method: str, done: Done) -> None:
        """Begin a call in a process that is free: see `SandboxProcess.call`."""
        process, _ = self._free.pop()

        def ended(reply: Reply) -> None:
            if process in self._processes and not isinstance(reply.error, ProcessLost):
                self._free.append((process, time.monotonic()))
            done(reply)

        process.call({"method": method}, parts, ended)

    def grow(self) -> None:
        """Rows have waited for a while: start another process, if there may be one more."""
        if not self._starting and self._pause is None and len(self._processes) < self._most:
            self._begin_start()

    def close(self) -> None:
        """End all of them."""
        self._closed = True
        for timer in (self._pause, self._look):
            if timer is not None:
                timer.cancel()
        for task in list(self._starting):
            task.cancel()
        processes, self._processes = self._processes, {}
        self._free.clear()
        for process in processes:
            process.end()

    async def _started(self) -> DescribedModel:
        process, model = await self._start(self._lost)
        if self._closed:
            process.end()
            raise ProcessLost("was ended")
        self._processes[process] = model.device_bytes
        self._free.append((process, time.monotonic()))
        return model

    def _begin_start(self) -> None:
        self._pause = None
        if self._closed:
            return
        task = asyncio.create_task(self._start_another())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start_another(self) -> None:
        try:
            await self._started()
        except Exception as exc:  # noqa: BLE001 - it is tried again
            if self._closed:
                return
            self._failures += 1
            _log.warning("%s: a process could not be started: %s", self._name, exc)
            if self._processes:
                return
            self._start_later(min(_LONGEST_PAUSE_S * 2**self._failures, _LONGEST_RETRY_S))
        else:
            self._failures = 0
        self.when_free()  # those who wait are told

    def _lost(self, process: SandboxProcess, why: ProcessLost) -> None:
        if self._closed or process not in self._processes:
            return
        del self._processes[process]
        self._free = [free for free in self._free if free[0] is not process]
        now = time.monotonic()
        self._losses = self._losses + 1 if now - self._last_loss < _FORGIVEN_S else 0
        self._last_loss = now
        self.when_lost(why)
        _log.warning("%s: %s; another takes its place", self._name, why)
        if not self._processes and not self._starting:
            pause_s = min(_FIRST_PAUSE_S * 2**self._losses, _LONGEST_PAUSE_S)
            self._start_later(pause_s if self._losses else 0.0)

    def _start_later(self, seconds: float) -> None:
        if self._pause is None and not self._closed:
            self._pause = asyncio.get_running_loop().call_later(seconds, self._begin_start)

    def _look_later(self) -> None:
        if not self._closed:
            self._look = asyncio.get_running_loop().call_later(_LOOK_S, self._end_idle)

    def _end_idle(self) -> None:
        """End processes that have had nothing to do for a while."""
        now = time.monotonic()
        for process, since in [free for free in self._free if now - free[1] > _IDLE_S]:
            if len(self._processes) > 1:
                del self._processes[process]
                self._free.remove((process, since))
                process.end()
        self._look_later()


def problem_of(lost: ProcessLost) -> Problem:
    """What a client is told whose call ended with the process."""
    if lost.hung:
        return Problem(504, "the model did not answer in time.")
    if lost.by_memory:
        return Problem(503, "the model needed more memory than it may have.", {"retry-after": "5"})
    return Problem(500, f"the model failed on these inputs: its process {lost.reason}.")
