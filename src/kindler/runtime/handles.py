"""What a call of the runtime returns at once: a handle, which gets the result when the task ends."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from typing import Any, Literal

from kindler.errors import KindlerError, TaskTimeoutError, fresh
from kindler.runtime.messages import Report
from kindler.runtime.value_codec import Resolve

Status = Literal["pending", "running", "done", "failed", "cancelled"]

_log = logging.getLogger("kindler.runtime")
_CANCEL_TIMEOUT_S = 30.0


class TaskHandle:
    """A task and, once it has ended, its result. Thread-safe.

    Attributes:
        id: The task's id.
        call: The call, such as "predict() of 'net'".
        log: The last lines that the task printed; empty until it has ended.
    """

    def __init__(self, call: str, *, resolve: Resolve, cancel: Callable[[TaskHandle], None]) -> None:
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
        self._then: list[Callable[[TaskHandle], None]] = []

    def __repr__(self) -> str:
        return f"<{self.call}: {self._status}>"

    @property
    def status(self) -> Status:
        """The state: "pending", "running", "done", "failed" or "cancelled"."""
        return self._status

    @property
    def error(self) -> KindlerError | None:
        """The exception that `get` raises, or None."""
        return self._error

    @property
    def size(self) -> int:
        """The bytes of the result and the log; 0 until the task has ended."""
        return 0 if self._report is None else sum(map(len, self._report.buffers)) + len(self.log)

    def ready(self) -> bool:
        """Whether the task has ended, in whatever way."""
        return self._ended.is_set()

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it. The result of `fit` is the new version.

        Args:
            timeout: Seconds to wait; None waits as long as the task may take.

        Raises:
            TaskTimeoutError: The task has not ended yet and continues; or it exceeded its time limit.
            TaskCancelledError: The task was cancelled.
            WorkerLost: The task's workers were lost, one after the other.
            WorkerError: The code of the task raised; also an instance of the type that was raised.
            KindlerError: Any other error of Kindler.
        """
        if not self._ended.wait(timeout):
            raise TaskTimeoutError(task=self.call, waited_s=timeout or 0.0, goes_on=True)
        if self._error is not None:
            raise fresh(self._error)
        assert self._report is not None
        return self._report.result(self._resolve)

    def cancel(self) -> bool:
        """Cancel the task, also if it is running; returns whether that succeeded."""
        if not self._ended.is_set():
            self._cancel(self)
            self._ended.wait(_CANCEL_TIMEOUT_S)
        return self._status == "cancelled"

    def update(self, report: Report) -> None:
        """Take an engine's report; ignored once the task has ended."""
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
            # Not on the engine's thread: a callback may wait for another task.
            threading.Thread(
                target=self._call_back, args=(then,), name="kindler-callback", daemon=True
            ).start()

    def when_ended(self, call: Callable[[TaskHandle], None]) -> None:
        """Call a function with this handle when the task has ended; at once if it has."""
        with self._lock:
            if not self._ended.is_set():
                self._then.append(call)
                return
        self._call_back([call])

    def _call_back(self, then: list[Callable[[TaskHandle], None]]) -> None:
        for call in then:
            try:
                call(self)
            except Exception:  # noqa: BLE001 - the user's code, and nobody else to raise it to
                _log.exception("the callback of %r failed", self)
