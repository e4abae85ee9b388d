"""Metrics of all runs of an estimator by step, collected from workers' reports on the driver.

Kept for `get_train_summary`, and written to event files for TensorBoard. Step reports are merged exactly: a
mean over rows, once all workers have reported.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kindler import limits
from kindler.errors import ConfigError, MissingExtraError, NotFittedError

BATCH_LOSS = "batch_loss"

_numbers = itertools.count()

_NOT_DRAWN = {"epoch", "steps", "num_samples", "seconds"}
_VALIDATION = "val_"
# Orca's names, and their names here; the first that exists is used.
_ALIASES = {
    "loss": (BATCH_LOSS, "loss"),
    "learningrate": ("lr",),
    "throughput": ("rows_per_s",),
    "top1accuracy": ("accuracy", "acc"),
    "aucscore": ("auc", "auroc"),
}


class Sink(Protocol):
    def add(self, part: str, tag: str, value: float, step: int, wall_time: float) -> None: ...
    def rewind(self, step: int) -> None: ...
    def flush(self) -> None: ...


@dataclass(slots=True)
class _StepSums:
    loss: float = 0.0
    rows: float = 0
    lr: float = math.nan
    ranks: set[int] = field(default_factory=set)


class Summaries:
    """Series of (step, value, wall time), by part ("train" or "validation") and tag."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._series: dict[str, dict[str, list[tuple[int, float, float]]]] = {"train": {}, "validation": {}}
        self._size: int | None = None  # ranks of the present gang
        self._steps: dict[int, _StepSums] = {}  # that not all of them have reported
        self._sink: Sink | None = None
        self._epoch = 0  # the last one that this run reported

    @contextmanager
    def writing(self, sink: Sink | None) -> Iterator[None]:
        self._sink, self._epoch = sink, 0
        try:
            yield
        finally:
            self._sink = None

    def finish(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add epochs that no report announced: some workers cannot reach the driver."""
        for row in rows:
            if row["epoch"] > self._epoch:
                self._add_epoch(row, None)

    def report(self, fields: Mapping[str, Any]) -> None:
        """Handle a report; kinds other than "gang", "epoch" and "steps" are ignored."""
        if fields["name"] == "gang":
            self._size = fields["workers"]
            self._steps.clear()
        elif fields["name"] == "steps":
            self._merge_steps(fields)
        elif fields["name"] == "epoch":
            self._add_epoch(fields["row"], fields.get("step"))
            if self._sink is not None and (goodput := fields.get("goodput")) is not None:
                for tag, value in goodput.scalars().items():
                    self._sink.add("train", tag, value, fields["step"], self._clock())
        else:
            return
        if self._sink is not None:
            self._sink.flush()

    def series(self, part: str, tag: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """One series as rows of (step, value, wall time); `tag` may be one of Orca's names.

        Raises NotFittedError before the first fit, ConfigError for an unknown metric.
        """
        known = self._series[part]
        if not self._series["train"]:
            raise NotFittedError("no summaries yet: call fit() first.")
        name = _find(tag.removeprefix(_VALIDATION) if part == "validation" else tag, list(known))
        if name is None:
            hint = "" if known else "\nHint: fit(validation_data=...) records validation metrics."
            raise ConfigError(f"no {part} summary {tag!r}; available: {sorted(known)}.{hint}")
        return np.array(known[name], dtype=np.float64).reshape(-1, 3)

    def _merge_steps(self, fields: Mapping[str, Any]) -> None:
        rank, rates = fields["rank"], fields.get("lr", ())
        for place, (mean, rows) in enumerate(zip(fields["loss"], fields["rows"], strict=True)):
            sums = self._steps.setdefault(fields["first"] + place, _StepSums())
            if rank in sums.ranks:
                continue
            sums.ranks.add(rank)
            sums.rows += rows
            sums.loss += mean * rows if rows else 0.0  # without rows the mean may be NaN
            if place < len(rates):
                sums.lr = rates[place]
        self._add_steps(step for step, sums in self._steps.items() if len(sums.ranks) == self._size)

    def _add_steps(self, steps: Iterable[int]) -> None:
        for step in sorted(steps):
            sums = self._steps.pop(step)
            if sums.rows:
                self._add("train", BATCH_LOSS, sums.loss / sums.rows, step)
                if not math.isnan(sums.lr):
                    self._add("train", "lr", sums.lr, step)

    def _add_epoch(self, row: Mapping[str, Any], step: int | None) -> None:
        self._epoch = int(row.get("epoch", 0))
        if step is None:
            step = max(0, self._last("train", "loss")) + int(row.get("steps", 1))
        # No more reports of them will come. Those with later ones were made by a worker that was replaced
        # before it reported them; they are left out, as to add one would take training back to it.
        self._add_steps(known for known in self._steps if self._last("train", BATCH_LOSS) < known <= step)
        self._steps = {known: sums for known, sums in self._steps.items() if known > step}
        for name, value in row.items():
            part = "validation" if name.startswith(_VALIDATION) else "train"
            tag = name.removeprefix(_VALIDATION)
            by_step = name == "lr" and self._last("train", "lr") >= step
            if tag not in _NOT_DRAWN and isinstance(value, int | float) and not by_step:
                self._add(part, tag, float(value), step)

    def _last(self, part: str, tag: str) -> int:
        known = self._series[part].get(tag)
        return known[-1][0] if known else -1

    def _add(self, part: str, tag: str, value: float, step: int) -> None:
        if self._last(part, tag) >= step:  # training went back
            for tags in self._series.values():
                tags.update({each: [p for p in points if p[0] < step] for each, points in tags.items()})
            if self._sink is not None:
                self._sink.rewind(step)
        now = self._clock()
        self._series[part].setdefault(tag, []).append((step, value, now))
        if self._sink is not None:
            self._sink.add(part, tag, value, step, now)


def _find(tag: str, names: Sequence[str]) -> str | None:
    if tag in names:
        return tag
    bare = tag.lower().replace("_", "")
    wanted = next((name for name in _ALIASES.get(bare, ()) if name in names), None)
    return wanted or next((name for name in names if name.lower().replace("_", "") == bare), None)


def log_folder(log_dir: str | PathLike[str]) -> Path:
    if find_spec("tensorboard") is None:
        raise MissingExtraError(what="TensorBoard(log_dir)", package="tensorboard", extra="tensorboard")
    name = os.fspath(log_dir).removeprefix("file://")
    if "://" in name:
        raise ConfigError(f"log_dir must be a local folder of the driver; received {name!r}.")
    return Path(name).absolute()


class EventFiles:
    """Event files for TensorBoard in `<folder>/train` and `<folder>/validation`.

    Uses tensorboard's record and message classes directly: its writer would import TensorFlow if installed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}
        self._flushed = 0.0

    def __enter__(self) -> EventFiles:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def add(self, part: str, tag: str, value: float, step: int, wall_time: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary: Any = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        self._write(part, summary=summary, step=step, wall_time=wall_time)

    def rewind(self, step: int) -> None:
        """Make readers drop what was written from `step` on."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        start: Any = SessionLog(status=SessionLog.START)
        for part in ("train", "validation"):
            if part in self._writers or (self._folder / part).is_dir():
                self._write(part, session_log=start, step=step, wall_time=time.time())

    def flush(self) -> None:
        """Make what was written visible to readers, at most once a second."""
        if time.monotonic() - self._flushed >= limits.FLUSH_S:
            self._flushed = time.monotonic()
            for writer in self._writers.values():
                writer.flush()

    def _write(self, part: str, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        if part not in self._writers:
            self._writers[part] = _open(self._folder / part)
            self._write(part, file_version="brain.Event:2", wall_time=time.time())
        event: Any = Event(**fields)
        self._writers[part].write(event.SerializeToString())


def _open(folder: Path) -> Any:
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    # Readers take files in the order of their names.
    who = f"{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
    return RecordWriter((folder / f"events.out.tfevents.{time.time():017.6f}.{who}").open("wb"))
