"""Metrics of all runs of an estimator by step, collected from workers' reports.

Kept for `get_train_summary`, and passed on to a sink (TensorBoard). Step reports are merged exactly: a mean
over rows, once all workers have reported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kindler.errors import ConfigError, NotFittedError

BATCH_LOSS = "batch_loss"

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
class _Sums:
    loss: float = 0.0
    rows: float = 0
    lr: float = math.nan
    ranks: set[int] = field(default_factory=set)


class StepMerge:
    def __init__(self) -> None:
        self._size: int | None = None
        self._open: dict[int, _Sums] = {}

    def begin(self, size: int | None) -> None:
        """Start a gang of `size` ranks; unfinished steps of an earlier one are dropped."""
        self._size = size
        self._open.clear()

    def add(
        self, rank: int, first: int, loss: Sequence[float], rows: Sequence[float], lr: Sequence[float]
    ) -> list[tuple[int, float, float]]:
        """Add a rank's steps; return (step, loss, lr) of those that are now complete."""
        for offset, (mean, count) in enumerate(zip(loss, rows, strict=True)):
            sums = self._open.setdefault(first + offset, _Sums())
            if rank in sums.ranks:
                continue
            sums.ranks.add(rank)
            sums.rows += count
            sums.loss += mean * count if count else 0.0  # without rows the mean may be NaN
            if offset < len(lr):
                sums.lr = lr[offset]
        return self._take(lambda step, sums: len(sums.ranks) == self._size)

    def end_epoch(self, step: int) -> list[tuple[int, float, float]]:
        """An epoch ended at `step`: no more reports of its steps will come."""
        return self._take(lambda known, _: known <= step)

    def _take(self, ready: Callable[[int, _Sums], bool]) -> list[tuple[int, float, float]]:
        done = sorted(step for step, sums in self._open.items() if ready(step, sums))
        taken = [(step, self._open.pop(step)) for step in done]
        return [(step, sums.loss / sums.rows, sums.lr) for step, sums in taken if sums.rows]


class Summaries:
    """Series of (step, value, wall time), by part ("train" or "validation") and tag."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._series: dict[str, dict[str, list[tuple[int, float, float]]]] = {"train": {}, "validation": {}}
        self._merge = StepMerge()
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
            self._merge.begin(fields["workers"])
        elif fields["name"] == "steps":
            steps = {key: fields[key] for key in ("rank", "first", "loss", "rows")}
            self._add_steps(self._merge.add(**steps, lr=fields.get("lr", ())))
        elif fields["name"] == "epoch":
            self._add_epoch(fields["row"], fields.get("step"))
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

    def _add_steps(self, steps: Sequence[tuple[int, float, float]]) -> None:
        for step, loss, lr in steps:
            self._add("train", BATCH_LOSS, loss, step)
            if not math.isnan(lr):
                self._add("train", "lr", lr, step)

    def _add_epoch(self, row: Mapping[str, Any], step: int | None) -> None:
        self._epoch = int(row.get("epoch", 0))
        step = self._step_after(row) if step is None else step
        self._add_steps(self._merge.end_epoch(step))
        for name, value in row.items():
            part = "validation" if name.startswith(_VALIDATION) else "train"
            tag = name.removeprefix(_VALIDATION)
            if tag in _NOT_DRAWN or not isinstance(value, int | float) or self._has_steps(name, step):
                continue
            self._add(part, tag, float(value), step)

    def _has_steps(self, name: str, step: int) -> bool:
        return name == "lr" and self._last("train", "lr") >= step

    def _step_after(self, row: Mapping[str, Any]) -> int:
        return max(0, self._last("train", "loss")) + int(row.get("steps", 1))

    def _last(self, part: str, tag: str) -> int:
        known = self._series[part].get(tag)
        return known[-1][0] if known else -1

    def _add(self, part: str, tag: str, value: float, step: int) -> None:
        if self._last(part, tag) >= step:
            self._rewind(step)
        now = self._clock()
        self._series[part].setdefault(tag, []).append((step, value, now))
        if self._sink is not None:
            self._sink.add(part, tag, value, step, now)

    def _rewind(self, step: int) -> None:
        for tags in self._series.values():
            for tag, points in list(tags.items()):
                tags[tag] = [point for point in points if point[0] < step]
        if self._sink is not None:
            self._sink.rewind(step)


def _find(tag: str, names: Sequence[str]) -> str | None:
    if tag in names:
        return tag
    bare = tag.lower().replace("_", "")
    wanted = next((name for name in _ALIASES.get(bare, ()) if name in names), None)
    return wanted or next((name for name in names if name.lower().replace("_", "") == bare), None)
