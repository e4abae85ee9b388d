"""Groups of tasks, in sequence or in parallel. Nothing runs before `run()`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any

from kindler.errors import ConfigError, TaskCancelledError
from kindler.runtime.handles import Status, TaskHandle
from kindler.runtime.messages import Report, described
from kindler.runtime.proxies import Call, RuntimeModel, RuntimeScript
from kindler.runtime.settings import TaskSettings


class TaskGroup:
    """Tasks that are submitted together by `run()`: `runtime.sequence()` or `runtime.parallel()`.

    Args:
        make: Creates the handle of a call.
        start: Submits a call.
        settings: How to run the tasks.
    """

    def __init__(
        self,
        make: Callable[[Call], TaskHandle],
        start: Callable[[Call, TaskHandle], None],
        settings: TaskSettings,
    ) -> None:
        self._make = make
        self._start = start
        self._settings = settings
        self._tasks: list[tuple[Call, TaskHandle]] = []
        self._ran = False

    def __enter__(self) -> TaskGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def __iter__(self) -> Iterator[TaskHandle]:
        return iter(self.handles)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def handles(self) -> list[TaskHandle]:
        """The handles of the tasks, in the order of the calls."""
        return [handle for _, handle in self._tasks]

    def model(self, name: str) -> RuntimeModel:
        """A stored model whose method calls become tasks of this group."""
        return RuntimeModel(name, self._add, self._settings)

    def script(self, name: str) -> RuntimeScript:
        """A stored function whose calls become tasks of this group."""
        return RuntimeScript(name, self._add, self._settings)

    def run(self) -> TaskGroup:
        """Submit the tasks and return this group, which gives their results."""
        if self._ran:
            raise ConfigError("run() was called already.\nHint: make another sequence() or parallel().")
        self._ran = True
        self._begin()
        return self

    def getall(self, timeout: float | None = None) -> list[Any]:
        """The results of all tasks, in the order of the calls.

        Args:
            timeout: Seconds to wait for all of them together; None waits without a limit.

        Raises:
            KindlerError: The error of the first task that failed.
        """
        self._must_run()
        deadline = None if timeout is None else time.monotonic() + timeout
        return [
            handle.get(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for handle in self.handles
        ]

    def get(self, timeout: float | None = None) -> Any:
        """The result of the last task."""
        results = self.getall(timeout)
        return results[-1] if results else None

    def ready(self) -> bool:
        """Whether all tasks have ended."""
        return all(handle.ready() for handle in self.handles)

    @property
    def status(self) -> list[Status]:
        """The state of each task."""
        return [handle.status for handle in self.handles]

    def cancel(self) -> None:
        """Cancel the tasks that have not ended."""
        self._must_run()
        for handle in reversed(self.handles):
            handle.cancel()

    def _add(self, call: Call) -> TaskHandle:
        if self._ran:
            raise ConfigError(
                "calls cannot be added after run().\nHint: make another sequence() or parallel()."
            )
        handle = self._make(call)
        self._tasks.append((call, handle))
        return handle

    def _begin(self) -> None:
        raise NotImplementedError

    def _must_run(self) -> None:
        if not self._ran:
            raise ConfigError("the tasks have not been started.\nHint: call run() first.")


class Parallel(TaskGroup):
    """Tasks that run in parallel, as far as there are workers."""

    def _begin(self) -> None:
        for call, handle in self._tasks:
            self._start(call, handle)


class MapReduce(TaskGroup):
    """Tasks that run in parallel, and a last one that is called with the list of their results.

    The last one is a stored function: `model(name).reduce()` or `script(name).run()`. If one of the others
    fails, it is cancelled.
    """

    def _begin(self) -> None:
        if len(self._tasks) < 2:
            raise ConfigError("mapreduce() needs one call or more, and a last one that takes their results.")
        *mapped, (call, handle) = self._tasks
        left = len(mapped)
        lock = threading.Lock()

        def ended(done: TaskHandle) -> None:
            nonlocal left
            if done.status != "done":
                ending = "failed" if done.status == "failed" else "was cancelled"
                why = TaskCancelledError(f"not started, because {done.call} {ending}.")
                handle.update(Report("cancelled", error=described(why)))
            with lock:
                left -= 1
                if left:
                    return
            if not handle.ready():
                results = [one.get(0) for _, one in mapped]
                self._start(replace(call, args=(results,)), handle)

        for one, its in mapped:
            its.when_ended(ended)
            self._start(one, its)


class Sequence(TaskGroup):
    """Tasks that run one after the other; when one fails, those after it are cancelled.

    Names are resolved when a task's turn comes: `predict` after `fit` uses the new version.
    """

    def _begin(self) -> None:
        self._go_on(0)

    def _go_on(self, at: int) -> None:
        if at >= len(self._tasks):
            return
        call, handle = self._tasks[at]

        def ended(done: TaskHandle) -> None:
            if done.status == "done":
                self._go_on(at + 1)
                return
            ending = "failed" if done.status == "failed" else "was cancelled"
            why = TaskCancelledError(f"not started, because {done.call} {ending}.")
            for later in self.handles[at + 1 :]:
                later.update(Report("cancelled", error=described(why)))

        if handle.ready():
            ended(handle)  # cancelled before its turn
            return
        handle.when_ended(ended)
        self._start(call, handle)
