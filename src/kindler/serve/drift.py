"""Whether what a model is asked is still like what it was trained on: a sample of rows for each version.

A request leaves copies of a few of its rows, if the sample's rate allows it. What they say is computed on a
thread of its own: for the endpoint, and from time to time for the metrics and the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any

import numpy as np

from kindler.data.drift import DriftRule, drift_of
from kindler.data.statistics import FEW, Statistics, as_predictions, measured, summarised
from kindler.models.signature import Array, Arrays, Signature
from kindler.serve.http_errors import Problem

_log = logging.getLogger("kindler.serve")
_ROWS_OF_REQUEST = 8
_RATE, _BURST = 100, 1000  # requests that are sampled: per second, and at once after a quiet time
_LOOK = 16  # requests that pass before the clock is looked at again, once those of now are used up
_SMALL = 2048  # bytes of an array that is kept as it is
_DEADLINE_S = 30.0


class DriftWindow:
    """The last sampled rows of one version.

    Attributes:
        report: What was computed last; see `drift_of`.
    """

    def __init__(
        self,
        known: Statistics,
        signature: Signature,
        rule: DriftRule,
        rows: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._known, self._rule, self._clock = known, rule, clock
        self._columns = list(signature.columns or ())
        self._width = max(FEW, len(self._columns))
        self._ragged = {name[7:-1] for name in known.columns if name.startswith("length(")}
        self._requests: deque[tuple[int, Arrays, Arrays]] = deque()
        self._rows, self._most = 0, rows
        self._left, self._passed, self._then = _BURST, 0, clock()
        self._seen = self._compared = 0
        self.report: dict[str, Any] | None = None

    def add(self, inputs: Arrays, outputs: Arrays, rows: int) -> None:
        """On the event loop: a microsecond or two, and far less for a request that is not sampled."""
        if not self._left:
            self._passed += 1
            if self._passed % _LOOK or not self._refill():
                return
        if not rows:
            return
        self._left -= 1
        count = min(rows, _ROWS_OF_REQUEST)
        some = None if rows == count else np.linspace(0, rows - 1, count).astype(np.int64)
        predictions = as_predictions(list(outputs.values()))
        self._requests.append((count, self._kept(inputs, rows, some), self._kept(predictions, rows, some)))
        self._rows += count
        self._seen += 1
        while self._rows - self._requests[0][0] >= self._most:
            self._rows -= self._requests.popleft()[0]
        if not self._left:
            self._refill()

    def _refill(self) -> int:
        """How many requests may be sampled by now."""
        now = self._clock()
        gained = int((now - self._then) * _RATE)
        self._then = now if self._left + gained > _BURST else self._then + gained / _RATE
        self._left = min(_BURST, self._left + gained)
        return self._left

    @property
    def is_new(self) -> bool:
        """Whether rows came since the last report."""
        return self._seen > self._compared

    def compare(self) -> dict[str, Any]:
        """Compute the report; not on the event loop."""
        self._compared, requests = self._seen, list(self._requests)
        rows = sum(count for count, _, _ in requests)
        inputs = _together([one for _, one, _ in requests])
        if len(inputs) == 1 and len(self._columns) > 1:  # an input that joins columns
            [joined] = inputs.values()
            if joined.shape[1:] == (len(self._columns),):
                inputs = {name: joined[:, i] for i, name in enumerate(self._columns)}
        predictions = _together([one for _, _, one in requests])
        self.report = drift_of(
            self._known,
            summarised(measured(inputs), rows, cut=True),
            summarised(measured(predictions), rows, cut=True),
            rule=self._rule,
        )
        return self.report

    def _kept(self, arrays: Arrays, rows: int, some: Array | None) -> Arrays:
        """Some of the rows, or all; of long ones, and of objects, what is measured of them."""
        kept: Arrays = {}
        for name, array in arrays.items():
            is_number, is_ragged = array.dtype.kind in "biuf", name in self._ragged
            if not array.ndim or len(array) != rows:
                continue  # an output that is not one row for each row
            if some is None and is_number and not is_ragged and array.nbytes <= _SMALL:
                kept[name] = array if array.base is None else array.copy()  # which would hold a whole batch
            elif is_number and not is_ragged and array.size <= rows * self._width:
                kept[name] = array.copy() if some is None else array[some]
            elif is_number and is_ragged:
                count = rows if some is None else len(some)
                kept[f"length({name})"] = np.full(count, array.shape[1] if array.ndim > 1 else 1)
            else:
                kept |= measured({name: array}, some)
        return kept


class DriftWatch:
    """Compares all windows from time to time, on one thread; an alarm is logged once."""

    def __init__(
        self, windows: Callable[[], Iterable[tuple[str, int, DriftWindow]]], threads: Executor
    ) -> None:
        self._windows, self._threads = windows, threads
        self._alarmed: set[tuple[str, int]] = set()

    async def report(self, window: DriftWindow) -> dict[str, Any]:
        computing = asyncio.get_running_loop().run_in_executor(self._threads, window.compare)
        try:
            return await asyncio.wait_for(computing, _DEADLINE_S)
        except asyncio.TimeoutError:
            raise Problem(503, "the drift was not computed in time.", {"retry-after": "5"}) from None

    async def run(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            await self.look()

    async def look(self) -> None:
        windows = list(self._windows())
        self._alarmed &= {(name, number) for name, number, _ in windows}
        for name, number, window in windows:
            if not window.is_new:
                continue
            try:
                report = await self.report(window)
            except Exception:  # noqa: BLE001 - one model's rows must not end the watch over the others
                _log.exception("the drift of %s@%s cannot be computed", name, number)
                continue
            if report["alarm"] and (name, number) not in self._alarmed:
                _log.warning("%s@%s has drifted: %s", name, number, "; ".join(report["reasons"])[:2000])
            (self._alarmed.add if report["alarm"] else self._alarmed.discard)((name, number))


def _together(requests: list[Arrays]) -> Arrays:
    """What is known of all rows, by name; where shapes differ, of those that are like the last."""
    named: dict[str, list[Array]] = {}
    for one in requests:
        for name, array in one.items():
            named.setdefault(name, []).append(array)
    return {
        name: np.concatenate([array for array in arrays if array.shape[1:] == arrays[-1].shape[1:]])
        for name, arrays in named.items()
    }
