"""A worker's reports to the driver during an epoch, rare enough to cost nothing noticeable."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from kindler.group import Group

_PROGRESS_EVERY_S = 0.1
_STEPS_EVERY_S = 0.5


class ProgressReporter:
    """Reports the progress of an epoch from rank 0, a few times a second, if it is displayed.

    Args:
        worker: This worker.
        show: Whether progress is displayed.
        waited_s: Returns the seconds that this worker has spent in exchanges so far.
        prepares: Whether batches come out of a transform, so that to wait for one is to wait for that.
    """

    def __init__(
        self,
        worker: Group,
        *,
        show: bool,
        waited_s: Callable[[], float] = lambda: 0.0,
        prepares: bool = False,
    ) -> None:
        self._worker = worker
        self._active = show and worker.rank == 0
        self._waited_s = waited_s
        self._data_key = "transform_s" if prepares else "data_s"
        self._fixed: dict[str, Any] = {}
        self._began = self._reported = self._waited_before = self._data_s = 0.0
        self._rows = 0

    def begin(
        self,
        *,
        epoch: int,
        epochs: int | None,
        steps: int | None,
        step: int = 0,
        rows: int = 0,
        quiet: bool = False,
    ) -> None:
        """An epoch begins, or resumes at `step` after `rows` rows; reported at once unless `quiet`."""
        self._began = self._reported = time.perf_counter()
        self._waited_before = self._waited_s()
        self._data_s, self._rows = 0.0, rows
        self._fixed = {"epoch": epoch, "steps": steps} | ({} if epochs is None else {"epochs": epochs})
        if self._active and not quiet:
            self._report(step, None, {})

    def took_data(self, seconds: float) -> None:
        """Add the seconds it took to get a batch."""
        self._data_s += seconds

    def step(self, step: int, rows: int, figures: Callable[[], tuple[float, Mapping[str, float]]]) -> None:
        """Count step number `step` of this epoch, with `rows` rows over all workers.

        `figures` returns the running loss and metrics; it is called only when they are reported.
        """
        self._rows += rows
        if self._active and time.perf_counter() - self._reported > _PROGRESS_EVERY_S:
            self._report(step, *figures())

    def _report(self, step: int, loss: float | None, metrics: Mapping[str, float]) -> None:
        self._reported = time.perf_counter()
        self._worker.report(
            "progress",
            **self._fixed,
            step=step,
            loss=loss,
            metrics=dict(metrics),
            rows=self._rows,
            seconds=self._reported - self._began,
            **{self._data_key: self._data_s},
            sync_s=self._waited_s() - self._waited_before,
        )


class StepReporter:
    """Reports the loss of every step, from every rank and several steps at a time, if steps are logged."""

    def __init__(self, worker: Group, *, active: bool) -> None:
        self.active = active
        self._worker = worker
        self._first = 0
        self._reported = time.perf_counter()
        self._loss: list[float] = []
        self._rows: list[float] = []
        self._lr: list[float] = []

    def step(self, step: int, *, loss: float, rows: float, lr: float) -> None:
        """Record the mean loss of step number `step` on this rank.

        `rows` is the weight of the mean: the number of rows, or of what else the loss is a mean of.
        """
        if not self._loss:
            self._first = step
        self._loss.append(loss if rows else 0.0)
        self._rows.append(rows)
        self._lr.append(lr)
        if time.perf_counter() - self._reported > _STEPS_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Report the remaining steps, at the end of an epoch."""
        self._reported = time.perf_counter()
        if self._loss:
            self._worker.report(
                "steps",
                rank=self._worker.rank,
                first=self._first,
                loss=self._loss,
                rows=self._rows,
                lr=self._lr,
            )
            self._loss, self._rows, self._lr = [], [], []
