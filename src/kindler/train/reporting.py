"""What a worker tells the driver while an epoch runs: seldom enough that nobody notices the cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

__all__ = ["ProgressReporter", "StepReporter"]

_PROGRESS_EVERY_S = 0.1
_STEPS_EVERY_S = 0.5


class Reports(Protocol):
    """What a reporter needs of the worker."""

    rank: int

    def report(self, kind: str, **fields: Any) -> None: ...


class ProgressReporter:
    """How far the epoch is: rank 0 tells it, a few times a second, if anybody looks.

    Args:
        worker: This worker.
        show: Whether anybody looks.
        waited_s: How many seconds this worker has waited in exchanges so far.
    """

    def __init__(self, worker: Reports, *, show: bool, waited_s: Callable[[], float] = lambda: 0.0) -> None:
        self._worker = worker
        self._shown = show and worker.rank == 0
        self._waited_s = waited_s
        self._fixed: dict[str, Any] = {}
        self._began = self._told = self._waited_before = self._data_s = 0.0
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
        """An epoch begins, or goes on at `step` after `rows` rows; the first word comes later if `quiet`."""
        self._began = self._told = time.perf_counter()
        self._waited_before = self._waited_s()
        self._data_s, self._rows = 0.0, rows
        self._fixed = {"epoch": epoch, "steps": steps} | ({} if epochs is None else {"epochs": epochs})
        if self._shown and not quiet:
            self._tell(step, None, {})

    def took_data(self, seconds: float) -> None:
        """So long it took to get a batch."""
        self._data_s += seconds

    def step(self, step: int, rows: int, figures: Callable[[], tuple[float, Mapping[str, float]]]) -> None:
        """A step is made: the `step`th of this epoch, with `rows` rows over all workers.

        `figures` gives the running loss and metrics; it is called only when they are told.
        """
        self._rows += rows
        if self._shown and time.perf_counter() - self._told > _PROGRESS_EVERY_S:
            self._tell(step, *figures())

    def _tell(self, step: int, loss: float | None, metrics: Mapping[str, float]) -> None:
        self._told = time.perf_counter()
        self._worker.report(
            "progress",
            **self._fixed,
            step=step,
            loss=loss,
            metrics=dict(metrics),
            rows=self._rows,
            seconds=self._told - self._began,
            data_s=self._data_s,
            sync_s=self._waited_s() - self._waited_before,
        )


class StepReporter:
    """The loss of every single step: every rank tells its own, a few steps at a time, if they are logged."""

    def __init__(self, worker: Reports, *, active: bool) -> None:
        self.active = active
        self._worker = worker
        self._first = 0
        self._told = time.perf_counter()
        self._loss: list[float] = []
        self._rows: list[float] = []
        self._lr: list[float] = []

    def step(self, step: int, *, loss: float, rows: float, lr: float) -> None:
        """Step number `step` had this mean loss on this rank; `rows` is what the mean weighs.

        That is the number of rows, or of whatever else the loss is a mean over.
        """
        if not self._loss:
            self._first = step
        self._loss.append(loss if rows else 0.0)
        self._rows.append(rows)
        self._lr.append(lr)
        if time.perf_counter() - self._told > _STEPS_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Tell what was not told yet; at the end of an epoch."""
        self._told = time.perf_counter()
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
