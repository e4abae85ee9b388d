"""The books of a run on one worker, kept by both loops; a loop makes the steps.

History, checkpoints, bad losses, interrupts, end triggers and reports to the driver are handled here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kindler.data.batches import Rows
from kindler.group import Group
from kindler.sync.contract import Sync
from kindler.train.checkpoints import CheckpointWriter
from kindler.train.loss_guard import LossGuard, OnNan
from kindler.train.options import Task
from kindler.train.run_start import Start, load_local_states, over_already
from kindler.train.triggers import Progress, end_of_epoch

_PROGRESS_EVERY_S = 0.1
_STEPS_EVERY_S = 0.5


class EpochLedger:
    """A run from start to end, epoch by epoch. The states of `callbacks` go into checkpoints."""

    def __init__(
        self,
        worker: Group,
        task: Task,
        replica: Any,
        sync: Sync,
        train: Rows,
        start: Start,
        callbacks: Sequence[Any],
        on_nan: OnNan,
    ) -> None:
        options = self._options = task.training
        self._worker, self._replica, self._sync, self._start = worker, replica, sync, start
        self._expected = options.steps_per_epoch or train.expected
        self.steps = options.steps_per_epoch or train.steps  # None if known only at the end of an epoch
        self.last_epoch = start.first_epoch + options.epochs_to_train
        self.rows: list[dict[str, Any]] = [dict(row) for row in start.rows]
        self.halted = False
        self.is_over = start.stopped is not None or over_already(task, start)
        self.guard = LossGuard(
            on_nan, rank=worker.rank, tell=lambda message: worker.report("bad_loss", message=message)
        )
        self.checkpoints = CheckpointWriter(
            worker,
            task,
            counts=train.counts,
            marks=train.marks,
            start=start,
            callbacks=callbacks,
            anywhere=not sync.in_step,
            whole=sync.whole,
            look=self.guard.look,
        )
        self.progress = ProgressReporter(
            worker, show=task.show, waited_s=lambda: sync.waited_s, prepares=train.prepares
        )
        self.step_log = StepReporter(worker, active=task.log_steps)
        self._first_step = 0
        self._began = self._seconds = 0.0

    def goes_on(self, epoch: int) -> bool:
        """Whether to begin the next step; after an interrupt all workers end alike."""
        in_step = self._sync.in_step
        self.halted = not self._worker.go_on(self._replica.step + 1 if in_step else epoch, whole=in_step)
        return not self.halted

    def begin_epoch(self, epoch: int) -> int:
        """Begin an epoch, or resume the one the run starts in; return the steps it has made."""
        start, replica = self._start, self._replica
        resumes = start.step_in_epoch > 0 and epoch == start.epoch
        done = start.step_in_epoch if resumes else 0
        self._began = time.perf_counter() - (start.seconds if resumes else 0.0)
        self._first_step = replica.step - done
        replica.begin_epoch(epoch)
        if resumes:
            load_local_states(replica, start.local_states, self._worker)
        self.guard.begin_epoch()
        epochs = None if self._options.endless else self.last_epoch
        self.progress.begin(epoch=epoch, epochs=epochs, steps=self._expected, step=done)
        return done

    def ends_within_epoch(self) -> bool:
        return self._ends(Progress(epoch=self._replica.epoch, step=self._replica.step))

    def after_step(self, done: int, *, asked: bool) -> None:
        """Write a checkpoint after step `done` of the epoch, if it is due or `asked` for."""
        if self._sync.in_step:  # otherwise no moment within an epoch is the same on all workers
            seconds = time.perf_counter() - self._began
            self.checkpoints.after_step(self._replica, step_in_epoch=done, seconds=seconds, asked=asked)

    def catch_up(self) -> None:
        """After an epoch's steps: leave all workers with the same model, before it is evaluated."""
        self.guard.look()
        self.step_log.flush()
        self._sync.catch_up(self._replica)
        self._replica.merge_buffers()
        self._seconds = time.perf_counter() - self._began

    def row(self, epoch: int, rows: int, logs: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "steps": self._replica.step - self._first_step,
            "num_samples": rows,
            **logs,
            "seconds": self._seconds,
            "rows_per_s": rows / self._seconds if self._seconds else 0.0,
            **self._sync.figures(),
            **self.guard.figures(),
        }

    def end_epoch(self, row: dict[str, Any], *, stopped: str | None, asked: bool = False) -> None:
        """Record an epoch; sets `is_over` if it is the last. `stopped` is why a callback ends the run."""
        replica, worker = self._replica, self._worker
        if self.halted:
            self.is_over = True
            if not row["steps"]:
                replica.epoch = row["epoch"] - 1  # it has not begun
                return
        else:
            progress = end_of_epoch(replica.epoch, replica.step, row)
            triggered = self._ends(progress)
            self.is_over = stopped is not None or triggered or row["epoch"] >= self.last_epoch
            self.checkpoints.after_epoch(
                replica, progress, row, stopped=stopped, asked=asked, last=self.is_over
            )
            replica.wait_for_copy()
            self._sync.next_epoch(replica, row)
        self.rows.append(row)
        if worker.leads:
            worker.report("epoch", row=row, step=replica.step, whole=not self.halted)
        if not self.halted:
            self.checkpoints.keep_for_successor(replica, stopped=stopped)

    def _ends(self, progress: Progress) -> bool:
        most, trigger = self._sync.ends_at, self._options.end_trigger
        return (most is not None and progress.step >= most) or (trigger is not None and trigger(progress))


class ProgressReporter:
    """Reports an epoch's progress from rank 0, a few times a second.

    With `prepares`, batches come out of a transform, so waiting for data is waiting for that.
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
        """Begin an epoch, or resume it at `step` after `rows` rows; reported at once unless `quiet`."""
        self._began = self._reported = time.perf_counter()
        self._waited_before = self._waited_s()
        self._data_s, self._rows = 0.0, rows
        self._fixed = {"epoch": epoch, "steps": steps} | ({} if epochs is None else {"epochs": epochs})
        if self._active and not quiet:
            self._report(step, None, {})

    def took_data(self, seconds: float) -> None:
        self._data_s += seconds

    def step(self, step: int, rows: int, figures: Callable[[], tuple[float, Mapping[str, float]]]) -> None:
        """Count step number `step` of this epoch; `figures` is called only if they are reported."""
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
    """Reports the loss of every step, from every rank and several steps at a time."""

    def __init__(self, worker: Group, *, active: bool) -> None:
        self.active = active
        self._worker = worker
        self._first = 0
        self._reported = time.perf_counter()
        self._loss: list[float] = []
        self._rows: list[float] = []
        self._lr: list[float] = []

    def step(self, step: int, *, loss: float, rows: float, lr: float) -> None:
        """`rows` is the weight of the mean: rows, or whatever else the loss is a mean of."""
        if not self._loss:
            self._first = step
        self._loss.append(loss if rows else 0.0)
        self._rows.append(rows)
        self._lr.append(lr)
        if time.perf_counter() - self._reported > _STEPS_EVERY_S:
            self.flush()

    def flush(self) -> None:
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
