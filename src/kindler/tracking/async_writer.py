"""Writes the entries of a run in order on a thread of its own, so that the caller never waits.

If the server cannot be reached, entries are kept and retried with the next one, with a single warning.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from kindler.errors import first_line

Entry = Callable[[], None]

_log = logging.getLogger(__name__)


class Journal:
    """A queue of entries to write.

    Args:
        name: The destination, for the warning.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._entries: deque[Entry] = deque()
        self._wake = threading.Condition()
        self._news = self._closing = self._warned = False
        self._thread = threading.Thread(target=self._run, name="kindler-journal", daemon=True)
        self._thread.start()

    def add(self, entry: Entry) -> None:
        """Queue an entry behind the others."""
        with self._wake:
            self._entries.append(entry)
            self._news = True
            self._wake.notify()

    def close(self, timeout_s: float) -> int:
        """Wait until all entries are written or the timeout is over; returns how many are left."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        with self._wake:
            return len(self._entries)

    def _run(self) -> None:
        last = False
        while not last:
            with self._wake:
                # After a failure, retry only when a new entry arrives.
                self._wake.wait_for(lambda: self._news or self._closing)
                self._news, last = False, self._closing
                waiting = list(self._entries)
            self._write(waiting)

    def _write(self, waiting: list[Entry]) -> None:
        for entry in waiting:
            try:
                entry()
            except Exception as exc:  # noqa: BLE001  whatever it is, the run must go on
                self._warn(exc)
                return
            with self._wake:
                self._entries.popleft()

    def _warn(self, error: Exception) -> None:
        if self._warned:
            return
        self._warned = True
        _log.warning("cannot write to %s; training continues: %s", self._name, first_line(error))
