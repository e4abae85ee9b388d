"""Several tasks as one: one after the other, or side by side. Nothing runs before `run()`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from kindler.errors import ConfigError, TaskCancelledError
from kindler.runtime.handles import Handle, Status
from kindler.runtime.messages import Report, described
from kindler.runtime.proxies import Call, RuntimeModel, RuntimeScript
from kindler.runtime.settings import TaskSettings

__all__ = ["Flow", "Parallel", "Sequence"]


class Flow:
    """Tasks that were called and not sent yet. Make one with `runtime.sequence()` or `runtime.parallel()`.

    Args:
        make: Makes the handle of a call.
        start: Sends a call.
        settings: How its tasks are run.
    """

    def __init__(
        self,
        make: Callable[[Call], Handle],
        start: Callable[[Call, Handle], None],
        settings: TaskSettings,
    ) -> None:
        self._make = make
        self._start = start
        self._settings = settings
        self._tasks: list[tuple[Call, Handle]] = []
        self._ran = False

    def __enter__(self) -> Flow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def __iter__(self) -> Iterator[Handle]:
        return iter(self.handles)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def handles(self) -> list[Handle]:
        """The handles of its tasks, in the order of the calls."""
        return [handle for _, handle in self._tasks]

    def model(self, name: str) -> RuntimeModel:
        """A stored model; its verbs become tasks of this flow."""
        return RuntimeModel(name, self._add, self._settings)

    def script(self, name: str) -> RuntimeScript:
        """A stored function; calling it becomes a task of this flow."""
        return RuntimeScript(name, self._add, self._settings)

    def run(self) -> Flow:
        """Send the tasks; the flow itself then has their results."""
        if self._ran:
            raise ConfigError("run() was called already.\nHint: make another sequence() or parallel().")
        self._ran = True
        self._begin()
        return self

    def getall(self, timeout: float | None = None) -> list[Any]:
        """The results of all tasks, in the order of the calls.

        Args:
            timeout: Seconds to wait for all of them together; None waits.

        Raises:
            KindlerError: What the first task that failed raises.
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
        """Where each task stands."""
        return [handle.status for handle in self.handles]

    def cancel(self) -> None:
        """Cancel what has not ended."""
        self._must_run()
        for handle in reversed(self.handles):
            handle.cancel()

    def _add(self, call: Call) -> Handle:
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


class Parallel(Flow):
    """Tasks side by side, as far as there are workers."""

    def _begin(self) -> None:
        for call, handle in self._tasks:
            self._start(call, handle)


class Sequence(Flow):
    """Tasks one after the other; when one fails, those after it are cancelled.

    Names are looked up when a task's turn comes: `fit` and then `predict` uses what was trained.
    """

    def _begin(self) -> None:
        self._go_on(0)

    def _go_on(self, at: int) -> None:
        if at >= len(self._tasks):
            return
        call, handle = self._tasks[at]

        def ended(done: Handle) -> None:
            if done.status == "done":
                self._go_on(at + 1)
                return
            ending = "failed" if done.status == "failed" else "was cancelled"
            why = TaskCancelledError(f"not started, because {done.call} {ending}.")
            for later in self.handles[at + 1 :]:
                later.hear(Report("cancelled", error=described(why)))

        if handle.ready():
            ended(handle)  # cancelled before its turn
            return
        handle.when_ended(ended)
        self._start(call, handle)
