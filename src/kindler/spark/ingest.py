"""How far the rows are on their way to the workers: what Spark has computed, and what a worker has received.

Both are told to the run's listener as a report "ingest". Spark's own figures are those of its status store,
which only classic sessions have; they grow when a task ends, and every ten seconds while it runs. Where tasks
write the rows into files of Kindler's (`staging.py`), those are counted instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from py4j.protocol import Py4JError

REPORT = "ingest"
_LOOK_S = 1.0
_TELL_S = 0.5


class _Teller(Protocol):
    def report(self, name: str, **fields: Any) -> None: ...


class ReceivedRows:
    """Counts the rows that a worker receives, and reports them now and then and at the end.

    Args:
        teller: Who passes the reports on.
        clock: Returns the time in seconds.
    """

    def __init__(self, teller: _Teller, clock: Callable[[], float] = time.monotonic) -> None:
        self._teller, self._clock = teller, clock
        self._rows = self._bytes = 0
        self._told = clock()

    def add(self, rows: int, size: int) -> None:
        """Count rows that have come."""
        self._rows += rows
        self._bytes += size
        if self._clock() - self._told >= _TELL_S:
            self._tell(done=False)

    def end(self) -> None:
        """All have come."""
        if self._rows:
            self._tell(done=True)

    def _tell(self, *, done: bool) -> None:
        self._told = self._clock()
        self._teller.report(REPORT, stage="received", rows=self._rows, bytes=self._bytes, done=done)


class ComputedRows(threading.Thread):
    """Looks how many rows Spark has written for the workers, until they come.

    Args:
        context: The SparkContext.
        group: The group of the jobs that compute them.
        over: Whether the rows have arrived, or nobody waits for them any more.
        tell: Called with the fields of a report.
        written: Returns the rows and bytes that tasks have written so far, where that is no shuffle.
    """

    def __init__(
        self,
        context: Any,
        group: str,
        *,
        over: Callable[[], bool],
        tell: Callable[..., None],
        written: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(name="kindler-computed-rows", daemon=True)
        self._written = written
        self._context, self._group, self._over, self._tell = context, group, over, tell
        self._ended = threading.Event()
        self._told: dict[str, int] = {}

    def __enter__(self) -> ComputedRows:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        with suppress(Py4JError, OSError):  # the session may end meanwhile: there is nothing to tell then
            while not self._ended.wait(_LOOK_S) and not self._over():
                found = self._look()
                if found["tasks"] and found != self._told:
                    self._told = found
                    self._tell(REPORT, stage="computed", **found)

    def _look(self) -> dict[str, int]:
        tracker, store = self._context.statusTracker(), self._context._jsc.sc().statusStore()
        found = dict.fromkeys(("rows", "bytes", "done_tasks", "tasks"), 0)
        for job in tracker.getJobIdsForGroup(self._group):
            info = tracker.getJobInfo(job)
            for stage in info.stageIds if info is not None else ():
                with suppress(Py4JError):  # one that Spark has not planned yet, or has forgotten
                    data = store.lastStageAttempt(stage)
                    if data.shuffleWriteRecords() or data.numActiveTasks() or data.numCompleteTasks():
                        found["rows"] += int(data.shuffleWriteRecords())
                        found["bytes"] += int(data.shuffleWriteBytes())
                        found["done_tasks"] += int(data.numCompleteTasks())
                        found["tasks"] += int(data.numTasks())
        if self._written is not None:
            found["rows"], found["bytes"] = self._written()
        return found
