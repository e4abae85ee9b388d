"""A model in the server's own process, called in threads of its own: if it hangs, nobody else waits."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from kindler.models.signature import Arrays
from kindler.sandbox.memory import Parts
from kindler.sandbox.process import Done, Reply
from kindler.serve.http_errors import Problem
from kindler.serve.settings import ServeSettings
from kindler.serve.threads import Threads

Call: TypeAlias = Callable[[Arrays, str], Arrays]
MAX_LOST_CALLS = 2  # that did not return in time, and whose places others take


class LocalPool:
    """Calls of one model; a `Pool` as `Batcher` wants it.

    A call that has not returned within the time of a request gives up its place. Its thread is lost until it
    returns; when too many are, the model is down.
    """

    def __init__(
        self, call: Call, settings: ServeSettings, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._call = call
        self._timeout_s = settings.timeout_s
        self._clock = clock
        self.slots = settings.batches
        self._threads = Threads(settings.batches + MAX_LOST_CALLS, "kindler-call")
        self._numbers = itertools.count()
        self._running: dict[int, float] = {}  # when each call began
        self.when_free: Callable[[], None] = lambda: None  # the end of a call tells the batcher itself

    @property
    def _lost(self) -> int:
        late = self._clock() - self._timeout_s
        return sum(started < late for started in self._running.values())

    @property
    def free(self) -> int:
        """How many calls could begin now."""
        running = len(self._running)
        if not running:
            return self.slots
        return min(self.slots - running + self._lost, self.slots + MAX_LOST_CALLS - running)

    @property
    def is_down(self) -> bool:
        """Whether so many calls did not return that no others are begun."""
        most = self.slots + MAX_LOST_CALLS
        return len(self._running) >= most and self._lost >= most

    def grow(self) -> None:
        """There is nothing to add."""

    def call(self, parts: Parts, method: str, done: Done) -> None:
        """Begin a call; `done` is told of its end on the event loop."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        self._running[number] = self._clock()

        def ended(future: asyncio.Future[Reply]) -> None:
            del self._running[number]
            done(_stopping() if future.cancelled() else future.result())

        try:
            loop.run_in_executor(self._threads, self._run, parts, method).add_done_callback(ended)
        except RuntimeError:  # the threads were shut down
            del self._running[number]
            loop.call_soon(done, _stopping())

    def close(self) -> None:
        """Begin no more calls, and wait for none."""
        self._threads.shutdown(cancel_futures=True)

    def _run(self, parts: Parts, method: str) -> Reply:
        try:
            inputs = {
                name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
                for name, arrays in parts.items()
            }
            return Reply(self._call(inputs, method))
        except Exception as exc:  # noqa: BLE001 - whatever a model raises is told to whoever sent its rows
            return Reply({}, exc)


def _stopping() -> Reply:
    return Reply({}, Problem(503, "the server is stopping.", {"retry-after": "1"}))
