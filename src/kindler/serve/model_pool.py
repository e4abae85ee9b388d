"""What runs the calls of one version of a model: processes of its own, or threads of the server.

Of processes there is one from the beginning. Another is started while requests wait longer than a moment and
none is free, up to a limit; those that have nothing to do end after a while, the last one excepted. A process
that crashes, hangs or takes too much memory is replaced, after a pause that grows if that happens repeatedly.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from kindler.models.signature import Arrays
from kindler.sandbox.memory import Parts
from kindler.sandbox.process import Done, ProcessLost, Reply, SandboxProcess
from kindler.serve.http_errors import Problem
from kindler.serve.model_process import DescribedModel
from kindler.serve.settings import ServeSettings
from kindler.serve.threads import Threads

_log = logging.getLogger("kindler.serve")
_IDLE_CHECK_S, _IDLE_S = 1.0, 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONGEST_RETRY_S = 0.1, 5.0, 300.0
_FORGIVEN_S = 30.0  # without a loss
_MAX_FAILED_STARTS = 3  # one after the other: the model is down
MAX_LOST_CALLS = 2  # calls in threads that did not return in time, and whose places others take

Call: TypeAlias = Callable[[Arrays, str], Arrays]
Step: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]
Lost: TypeAlias = Callable[[SandboxProcess, ProcessLost], None]
Starter: TypeAlias = Callable[[Lost], Awaitable[tuple[SandboxProcess, DescribedModel]]]


class ModelPool:
    """Processes that have the same model.

    Attributes:
        most: The most processes.
        when_free: Is called when a process has become free that was not before.
        when_lost: Is told of every process that was lost, and is replaced.
    """

    def __init__(self, name: str, start: Starter, *, most: int) -> None:
        self._name = name
        self._start = start
        self.most = most
        self._calls = 1  # that a process takes at a time
        self._processes: dict[SandboxProcess, int] = {}  # and what each has of its GPU's memory
        # Places for a call, and since when; the one used last is used first.
        self._free: list[tuple[SandboxProcess, float]] = []
        self._starting: asyncio.Task[None] | None = None
        self._closed = False
        self._losses = self._failures = 0
        self._last_loss = 0.0
        self._idle_check: asyncio.TimerHandle | None = None
        self.when_free: Callable[[], None] = lambda: None
        self.when_lost: Callable[[ProcessLost], None] = lambda why: None

    async def open(self) -> DescribedModel:
        """Start the first process."""
        model = await self._started()
        self._end_idle()
        return model

    @property
    def free(self) -> int:
        """How many calls could begin now."""
        return len(self._free)

    @property
    def processes(self) -> int:
        return len(self._processes)

    @property
    def slots(self) -> int:
        """How many calls run at a time."""
        return self._calls * max(1, len(self._processes))

    @property
    def is_next_beside_another(self) -> bool:
        """Whether the next call would begin in a process that is in one."""
        return bool(self._free) and self._places_of(self._free[-1][0]) < self._calls

    @property
    def is_down(self) -> bool:
        """Whether no call can be begun, and none will soon."""
        return not self._processes and self._failures >= _MAX_FAILED_STARTS

    @property
    def own_bytes(self) -> int:
        """What its processes have in memory for themselves."""
        return sum(process.own_bytes() for process in self._processes)

    @property
    def device_bytes(self) -> int:
        """What its processes have of their GPU's memory."""
        return sum(self._processes.values())

    def take(self) -> SandboxProcess:
        """A process that is free, for calls one after the other, until `give_back`."""
        return self._free.pop()[0]

    def give_back(self, process: SandboxProcess) -> None:
        """It is free again, unless it was lost."""
        if process in self._processes:
            self._free.append((process, time.monotonic()))

    def call(self, parts: Parts, method: str, done: Done) -> None:
        """Begin a call in a process that is free: see `SandboxProcess.call`."""
        process = self.take()

        def ended(reply: Reply) -> None:
            if not isinstance(reply.error, ProcessLost):
                self.give_back(process)
            done(reply)
            if self._free:
                self.when_free()

        process.call({"method": method}, parts, ended)

    def grow(self) -> None:
        """Rows have waited for a while: start another process, if there may be one more."""
        if len(self._processes) < self.most:
            self._start_another(0.0)

    def close(self) -> None:
        self._closed = True
        for running in (self._starting, self._idle_check):
            if running is not None:
                running.cancel()
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
        self._calls = model.calls
        self._free += [(process, time.monotonic())] * model.calls
        return model

    def _places_of(self, process: SandboxProcess) -> int:
        return sum(free is process for free, _ in self._free)

    def _start_another(self, pause_s: float) -> None:
        if not self._closed and (self._starting is None or self._starting.done()):
            self._starting = asyncio.create_task(self._keep_starting(pause_s))

    async def _keep_starting(self, pause_s: float) -> None:
        """Start a process; without any, try again until one starts."""
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._started()
            except Exception as exc:  # noqa: BLE001 - it is tried again
                if self._closed:
                    return
                self._failures += 1
                _log.warning("%s: a process could not be started: %s", self._name, exc)
                if self._processes:
                    return
                pause_s = min(_LONGEST_PAUSE_S * 2**self._failures, _LONGEST_RETRY_S)
                self.when_free()  # requests fail once it is down
            else:
                self._failures = 0
                self.when_free()
                return

    def _lost(self, process: SandboxProcess, why: ProcessLost) -> None:
        if self._closed or process not in self._processes:
            return
        del self._processes[process]
        self._free = [free for free in self._free if free[0] is not process]
        now = time.monotonic()
        self._losses = self._losses + 1 if now - self._last_loss < _FORGIVEN_S else 0
        self._last_loss = now
        self.when_lost(why)
        _log.warning("%s: %s; starting a replacement", self._name, why)
        if not self._processes:
            pause_s = min(_FIRST_PAUSE_S * 2**self._losses, _LONGEST_PAUSE_S)
            self._start_another(pause_s if self._losses else 0.0)

    def _end_idle(self) -> None:
        """End processes that have had nothing to do for a while, now and from time to time."""
        now = time.monotonic()
        idle = {process for process, since in self._free if now - since > _IDLE_S}
        for process in [one for one in idle if self._places_of(one) == self._calls]:
            if len(self._processes) > 1:
                del self._processes[process]
                self._free = [free for free in self._free if free[0] is not process]
                process.end()
        self._idle_check = asyncio.get_running_loop().call_later(_IDLE_CHECK_S, self._end_idle)


class LocalPool:
    """A model in the server's own process, called in threads: if it hangs, no other model waits.

    A call that has not returned within the time of a request gives up its place. Its thread is lost until it
    returns; when too many are, the model is down.
    """

    processes = own_bytes = device_bytes = 0
    is_next_beside_another = False

    def __init__(
        self,
        call: Call,
        settings: ServeSettings,
        clock: Callable[[], float] = time.perf_counter,
        *,
        step: Step | None = None,
    ) -> None:
        self._call, self._step = call, step
        self._timeout_s = settings.timeout_s
        self._clock = clock
        self.slots = settings.batches
        self._most = settings.batches + MAX_LOST_CALLS
        self._threads = Threads(self._most, "kindler-call")
        self._running: list[float] = []  # when each call began
        self.when_free: Callable[[], None] = lambda: None
        self.when_lost: Callable[[ProcessLost], None] = lambda why: None

    @property
    def _late(self) -> int:
        return sum(started < self._clock() - self._timeout_s for started in self._running)

    @property
    def free(self) -> int:
        running = len(self._running)
        return min(self.slots + self._late, self._most) - running if running else self.slots

    @property
    def is_down(self) -> bool:
        return len(self._running) >= self._most and self._late >= self._most

    def grow(self) -> None:
        """There is nothing to add."""

    def take(self) -> LocalSteps:
        return LocalSteps(self)

    def give_back(self, steps: LocalSteps) -> None:
        """Every call has a thread of its own."""

    def call(self, parts: Parts, method: str, done: Done) -> None:
        """Begin a call; `done` is told of its end on the event loop."""

        def run() -> Reply:
            joined = {name: a[0] if len(a) == 1 else np.concatenate(a) for name, a in parts.items()}
            return Reply(self._call(joined, method))

        self._begin(run, done)

    def step(self, asked: Mapping[str, Any], done: Done) -> None:
        """The same for a step of the model's answers."""
        assert self._step is not None
        step = self._step
        self._begin(lambda: Reply({}, fields=dict(step(asked))), done)

    def _begin(self, run: Callable[[], Reply], done: Done) -> None:
        started = self._clock()
        self._running.append(started)

        def ended(future: asyncio.Future[Reply]) -> None:
            self._running.remove(started)
            done(_stopping() if future.cancelled() else future.result())
            self.when_free()

        loop = asyncio.get_running_loop()
        try:
            loop.run_in_executor(self._threads, partial(_caught, run)).add_done_callback(ended)
        except RuntimeError:  # the threads were shut down
            self._running.remove(started)
            loop.call_soon(done, _stopping())

    def close(self) -> None:
        """Begin no more calls, and wait for none."""
        self._threads.shutdown(cancel_futures=True)


class LocalSteps:
    """What stands for a process that was taken, where there is none."""

    def __init__(self, pool: LocalPool) -> None:
        self._pool = pool

    def call(self, fields: Mapping[str, Any], parts: Parts, done: Done) -> None:
        self._pool.step(fields["step"], done)

    def lose(self, why: ProcessLost) -> None:
        """There is nothing to kill."""


def _caught(run: Callable[[], Reply]) -> Reply:
    try:
        return run()
    except Exception as exc:  # noqa: BLE001 - whatever a model raises is told to whoever sent its rows
        return Reply({}, exc)


def _stopping() -> Reply:
    return Reply({}, Problem(503, "the server is stopping.", {"retry-after": "1"}))


Pool: TypeAlias = ModelPool | LocalPool
