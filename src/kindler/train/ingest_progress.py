"""The line that shows rows on their way from Spark to the workers, before the first step.

In a terminal it is redrawn in place; elsewhere it is printed every ten seconds, and nothing is printed for
rows that come sooner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

_FIRST_S, _REDRAWN_S, _PRINTED_S = 1.0, 0.2, 10.0


class IngestLine:
    """Shows reports "ingest" until `end`.

    Args:
        stream: Returns where to write.
        in_place: Whether the line can be redrawn there.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        stream: Callable[[], TextIO],
        in_place: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._in_place, self._clock = stream, in_place, clock
        self._computed: Mapping[str, Any] = {}
        self._received: dict[int, tuple[int, int, bool]] = {}
        self._began: float | None = None
        self._shown: float | None = None
        self._text = ""

    def report(self, fields: Mapping[str, Any]) -> None:
        """Take a report, and show it if the last one was shown long enough ago."""
        now = self._clock()
        self._began = now if self._began is None else self._began
        if fields["stage"] == "computed":
            self._computed = fields
        else:
            self._received[fields["worker"]] = (fields["rows"], fields["bytes"], fields["done"])
        self._text = ingest_text(self._computed, list(self._received.values()))
        in_place = self._in_place()
        pause = _REDRAWN_S if in_place else _PRINTED_S
        due = (
            self._began + (_FIRST_S if in_place else _PRINTED_S)
            if self._shown is None
            else self._shown + pause
        )
        if now >= due:
            self._shown = now
            self._show(in_place)

    def end(self) -> None:
        """No more rows come: the last figures stay, if any were shown."""
        if self._shown is not None:
            in_place = self._in_place()
            self._show(in_place)
            if in_place:
                self._stream().write("\n")
        self._computed, self._received, self._began, self._shown = {}, {}, None, None

    def _show(self, in_place: bool) -> None:
        stream = self._stream()
        stream.write(f"\r\x1b[2K{self._text}" if in_place else f"{self._text}\n")
        stream.flush()


def ingest_text(computed: Mapping[str, Any], received: list[tuple[int, int, bool]]) -> str:
    """The line itself.

    >>> ingest_text({"rows": 1500, "bytes": 2_500_000, "done_tasks": 3, "tasks": 16}, [])
    'rows from Spark: 1,500 computed (2.5 MB, 3 of 16 tasks)'
    >>> ingest_text({"rows": 0, "bytes": 0, "done_tasks": 0, "tasks": 16}, [])
    'rows from Spark: 0 of 16 tasks done'
    >>> ingest_text({"rows": 3000}, [(500, 4000, False), (700, 5600, True)])
    'rows from Spark: 1,200 of 3,000 received (9.6 kB)'
    """
    if not received:
        tasks = f"{computed['done_tasks']} of {computed['tasks']} tasks"
        if not computed["rows"]:  # Spark counts the rows of a task when it is done
            return f"rows from Spark: {tasks} done"
        return f"rows from Spark: {computed['rows']:,} computed ({_size(computed['bytes'])}, {tasks})"
    rows, size = (sum(each[i] for each in received) for i in (0, 1))
    total = max(rows, computed.get("rows", 0))
    whole = f" of {total:,}" if total > rows else ""
    return f"rows from Spark: {rows:,}{whole} received ({_size(size)})"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
