"""What a call of the runtime gives back at once: a handle, which has the result when there is one."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from typing import Any, Literal

from kindler.errors import KindlerError, TaskTimeoutError
from kindler.runtime.messages import Report
from kindler.runtime.value_codec import Resolve

__all__ = ["Handle", "Status"]

Status = Literal["pending", "running", "done", "failed", "cancelled"]

_log = logging.getLogger("kindler.runtime")
_CANCEL_TIMEOUT_S = 30.0


class Handle:
    """A task, and its result once it is there. Any thread may use it.

    Attributes:
        id: The task's id.
        call: What was asked for, such as "predict('net')".
        log: The last lines that the task printed, once it has ended.
    """

    def __init__(self, call: str, *, resolve: Resolve, cancel: Callable[[Handle], None]) -> None:
        self.id = uuid.uuid4().hex
        self.call = call
        self.log = ""
        self._resolve = resolve
        self._cancel = cancel
        self._status: Status = "pending"
        self._report: Report | None = None
        self._error: KindlerError | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._then: list[Callable[[Handle], None]] = []

    def __repr__(self) -> str:
        return f"<{self.call}: {self._status}>"

    @property
    def status(self) -> Status:
        """Where it stands: "pending", "running", "done", "failed" or "cancelled"."""
        return self._status

    @property
    def error(self) -> KindlerError | None:
        """What it failed with, or None. It is what `get` raises."""
        return self._error

    def ready(self) -> bool:
        """Whether it has ended, one way or another."""
        return self._ended.is_set()

    def get(self, timeout: float | None = None) -> Any:
        """The result, when it is there. `fit` gives the new version.

        Args:
            timeout: Seconds to wait; None waits as long as the task may take.

        Raises:
            TaskTimeoutError: It is not there yet, and goes on; or it took longer than it may.
            TaskCancelledError: It was cancelled.
            WorkerLost: Its workers went away, one after the other.
            WorkerError: The code it ran raised; it is also an instance of what was raised.
            KindlerError: Anything else that Kindler complains about.
        """
        if not self._ended.wait(timeout):
            raise TaskTimeoutError(task=self.call, waited_s=timeout or 0.0, goes_on=True)
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report.result(self._resolve)

    def cancel(self) -> bool:
        """Do not run it, or end it where it runs; whether it was in time."""
        if not self._ended.is_set():
            self._cancel(self)
            self._ended.wait(_CANCEL_TIMEOUT_S)
        return self._status == "cancelled"

    def hear(self, report: Report) -> None:
        """What an engine tells of it; once it has ended, nothing changes it."""
        with self._lock:
            if self._ended.is_set():
                return
            if report.state in ("failed", "cancelled"):
                self._error = report.exception()
            self._status = report.state  # type: ignore[assignment]  # checked where it was read
            if report.state == "running":
                return
            self._report, self.log = report, report.log
            then, self._then = self._then, []
            self._ended.set()
        if then:
            # Not on the engine's thread: what they call may wait for another task.
            threading.Thread(target=self._tell, args=(then,), name="kindler-callback", daemon=True).start()

    def when_ended(self, call: Callable[[Handle], None]) -> None:
        """Call a function with this handle when it has ended; at once if it has."""
        with self._lock:
            if not self._ended.is_set():
                self._then.append(call)
                return
        self._tell([call])

    def _tell(self, then: list[Callable[[Handle], None]]) -> None:
        for call in then:
            try:
                call(self)
            except Exception:  # noqa: BLE001 - code of the user's: nobody else is there to hear of it
                _log.exception("the callback of %r failed", self)
