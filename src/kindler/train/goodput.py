"""Where the wall time of a run goes: new training steps, and what the rest is.

A `Stopwatch` on each worker divides its part of the run; what that of the first worker shows travels with
reports of epochs, checkpoints and the result. The `RunClock` on the driver adds what no worker sees: the
start before, the end after, and what was lost with a worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kindler.train.progress import clock_time

Part = Literal["steps", "start", "ingest", "sync", "validation", "checkpoint", "recovery", "other"]

_SHOWN_S = 0.05  # less is 0.0 in the line


@dataclass(frozen=True, slots=True, repr=False)
class Goodput:
    """The share of the wall time of a call of `fit` that was new training steps, and what the rest was.

    The parts, which add up to the wall time, as the driver and the first worker saw it:

    - `steps`: training steps that the result contains, without waiting for rows or for other workers.
    - `start`: starting processes, imports, the workers' meeting, building the model.
    - `ingest`: reading rows and writing them to local disk, and steps waiting for rows.
    - `sync`: steps waiting for other workers.
    - `validation`: evaluating `validation_data`.
    - `checkpoint`: training waiting for checkpoints. Most of their writing is in the background.
    - `recovery`: after the loss of a worker: steps that had to be repeated, waiting, and the new start.
    - `other`: callbacks, merging metrics, returning the result.

    Attributes:
        seconds: The seconds of each part.

    Examples:
        >>> Goodput({"steps": 9.0, "start": 2.25, "sync": 0.75})
        goodput 75% of 12.0 s (start 2.2 s, sync 0.8 s)
    """

    seconds: Mapping[str, float]

    @property
    def wall_s(self) -> float:
        """Seconds from the call of `fit` until the trained model was there."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The share of the wall time that was new training steps, from 0 to 1."""
        wall_s = self.wall_s
        return self.seconds.get("steps", 0.0) / wall_s if wall_s else 0.0

    def scalars(self) -> dict[str, float]:
        """The share and the seconds of each part, by their names in TensorBoard and MLflow."""
        return {f"goodput/{name}": value for name, value in {"share": self.share, **self.seconds}.items()}

    def __repr__(self) -> str:
        rest = [
            f"{part} {_duration(spent_s)}"
            for part, spent_s in self.seconds.items()
            if part != "steps" and spent_s >= _SHOWN_S
        ]
        text = f"goodput {self.share:.0%} of {_duration(self.wall_s)}"
        return f"{text} ({', '.join(rest)})" if rest else text


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else clock_time(seconds)


class Stopwatch:
    """A worker's time by part. Each `lap` names what the time since the one before was."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._began = self._last = clock()
        self._meters: dict[str, Callable[[], float]] = {}
        self._read: dict[str, float] = {}

    def watch(self, part: Part, meter: Callable[[], float]) -> None:
        """From now on, what `meter` grows by in a lap belongs to `part` instead of the lap's own."""
        self._meters[part], self._read[part] = meter, meter()

    def lap(self, part: Part) -> None:
        """Add the time since the last lap to `part`."""
        now = self._clock()
        left, self._last = now - self._last, now
        for name, meter in self._meters.items():
            reading = meter()
            inside, self._read[name] = min(left, reading - self._read[name]), reading
            self._add(name, inside)
            left -= inside
        self._add(part, left)

    @contextmanager
    def timing(self, part: Part) -> Iterator[None]:
        """Add the time of the block to `part`, and that since the last lap to "other"."""
        self.lap("other")
        yield
        self.lap(part)

    def resume(self, seconds: Mapping[str, float]) -> None:
        """Continue from where the run had spent `seconds`, at a checkpoint; getting here was recovery."""
        self._last = self._clock()
        self.seconds = dict(seconds)
        self._add("recovery", self._last - self._began)

    def _add(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds


class RunClock:
    """The wall time of a run on the driver, from when this is created.

    What the first worker's stopwatch does not explain is the start, or recovery once a worker was lost.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = clock()
        self._ingest_s = 0.0
        self._ingest_since: float | None = None  # when Spark was first heard computing rows
        self._start_s: float | None = None  # until the first gang was complete
        self._launched = self._lost = False
        self._spent: Mapping[str, float] = {}  # by the first worker, as reported last, which was
        self._reported: float | None = None  # then

    @contextmanager
    def ingest(self) -> Iterator[None]:
        """The block reads rows on the driver."""
        began = self._clock()
        yield
        self._ingest_s += self._clock() - began

    def launch(self) -> None:
        """Workers are about to be started; if not for the first time, some were lost."""
        if self._launched:
            self._lose()
        self._launched = True

    def hear(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Handle a worker's report; that of an epoch is returned with the `goodput` so far."""
        name = fields["name"]
        if name in ("replaced", "left"):
            self._lose()
        elif name == "regrouped":  # the stopwatches know the rest
            self._lost = True
        elif name == "ingest" and self._ingest_since is None:
            self._ingest_since = self._clock()
        elif name == "gang" and self._start_s is None:
            if self._ingest_since is not None:
                self._ingest_s += self._clock() - self._ingest_since
            self._start_s = self._clock() - self._began - self._ingest_s
        elif name == "epoch":
            self._spent, self._reported = fields["spent"], self._clock()
            return {**fields, "goodput": self.goodput(self._spent)}
        return fields

    def _lose(self) -> None:
        self._lost, self._reported = True, None

    def goodput(self, spent: Mapping[str, float]) -> Goodput:
        """The goodput so far; the first worker's stopwatch shows `spent`."""
        now, after_s = self._clock(), 0.0
        if self._reported is not None:  # the rest since then is the end of the run
            after_s = max(0.0, now - self._reported - sum(spent.values()) + sum(self._spent.values()))
        before_s = max(0.0, now - self._began - self._ingest_s - after_s - sum(spent.values()))
        start_s = min(before_s, self._start_s or 0.0) if self._lost else before_s
        own: dict[str, float] = {
            "start": start_s,
            "ingest": self._ingest_s,
            "recovery": before_s - start_s,
            "other": after_s,
        }
        return Goodput({part: spent.get(part, 0.0) + own.get(part, 0.0) for part in get_args(Part)})
