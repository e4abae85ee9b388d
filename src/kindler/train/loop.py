"""A training run on one worker, whoever makes the steps: history, checkpoints, bad losses, interrupts, end
triggers and reports to the driver. `step_loop` makes the steps itself, `fit_loop` follows another's `fit`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from kindler import limits
from kindler.data.batches import Rows
from kindler.group import Group
from kindler.sync.contract import Sync
from kindler.train.checkpoints import CheckpointFolder, Header, callback_states, pack
from kindler.train.goodput import Part, Stopwatch
from kindler.train.loss_guard import LossGuard
from kindler.train.options import Task
from kindler.train.triggers import Progress, end_of_epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The end of the last whole step, where ranks go on from when one was replaced.

    Attributes:
        snapshot: This rank's own state then; None at the beginning of an epoch.
        over: Whether it was the last step of its epoch.
        row: The epoch's row of the history, if its callbacks have seen it, and only the end is to be agreed.
        state: Of the run, for a replacement; empty for ranks that have it.
        buffers: For a replacement, those of the beginning of the epoch.
        saved: The last step that a checkpoint was asked for.
    """

    snapshot: tuple[bytes, int] | None
    over: bool = False
    row: Mapping[str, Any] | None = None
    state: bytes = field(default=b"", repr=False)
    buffers: Mapping[str, Any] = field(default_factory=dict, repr=False)
    saved: int = -1


@dataclass(frozen=True, kw_only=True)
class Start(Header):
    """Where a run stands before its first step; the replica has loaded its state.

    If `step_in_epoch` is 0, the next epoch is `epoch + 1`; otherwise `epoch` continues, and `local_states`,
    those of all earlier ranks, are loaded after `begin_epoch(epoch)`. With a `point`, `epoch` has begun on
    the other ranks, and continues.
    """

    framework: str = ""
    local_states: tuple[bytes, ...] = ()
    point: Point | None = None

    @property
    def within_epoch(self) -> bool:
        return self.step_in_epoch > 0 or self.point is not None

    @property
    def takes_over(self) -> bool:
        """Whether this process has taken the place of another one."""
        return self.point is not None and bool(self.point.state)


def over_already(task: Task, start: Start) -> bool:
    """Whether the run has nothing left to do before its first step."""
    most, trigger = task.training.max_steps, task.training.stop_when
    if most is not None and start.step >= start.first_step + most:
        return True
    if trigger is None or not start.step:
        return False
    if start.step_in_epoch:
        return trigger(Progress(epoch=start.epoch, step=start.step))
    if start.rows:
        return trigger(end_of_epoch(start.epoch, start.step, start.rows[-1]))
    # A model that was trained before: as if its next epoch had just begun.
    return trigger(Progress(epoch=start.epoch + 1, step=start.step))


class _Moved(Exception):
    """The run goes on in other processes, from a checkpoint in the folder or in this."""

    def __init__(self, checkpoint: bytes) -> None:
        self.checkpoint = checkpoint


class Place(NamedTuple):
    """A step of a run: its epoch, its number there, and its number since the model was new."""

    epoch: int
    done: int
    step: int


class Loop:
    """A run from start to end, epoch by epoch; `run` of a subclass makes the steps.

    All workers call the same methods at the same steps. For a checkpoint in mid-epoch each contributes its
    own state, and the first one writes.
    """

    def __init__(
        self,
        worker: Group,
        task: Task,
        replica: Any,
        sync: Sync,
        train: Rows,
        validation: Rows | None,
        start: Start,
        stopwatch: Stopwatch,
    ) -> None:
        options, folder = task.training, task.folder
        self.worker, self.task, self.replica, self.sync = worker, task, replica, sync
        self.train, self.validation, self.start, self.options = train, validation, start, options
        self.steps = options.steps_per_epoch or train.steps  # None if known only at the end of an epoch
        self.expected_steps = options.steps_per_epoch or train.expected
        self.last_epoch = start.first_epoch + options.epochs_to_train
        self.rows: list[dict[str, Any]] = [dict(row) for row in start.rows]
        self.halted = False
        self.is_over = start.stopped is not None or (start.point is None and over_already(task, start))
        self.stateful: Sequence[Any] = options.callbacks  # their states go into checkpoints
        # A callback of Keras's own may end the run at such a loss, which is then what its user wants.
        ends_itself = any(type(callback).__name__ == "TerminateOnNaN" for callback in options.callbacks)
        self.guard = LossGuard(
            "warn" if ends_itself and options.nan_loss == "raise" else options.nan_loss,
            rank=worker.rank,
            tell=lambda message: worker.report("bad_loss", message=message),
        )
        self.progress = ProgressReporter(
            worker, show=task.show, waited_s=lambda: sync.waited_s, prepares=train.prepares
        )
        self.step_log = StepReporter(worker, active=task.log_steps)
        self.stopwatch = stopwatch
        stopwatch.watch("ingest", lambda: self.progress.data_s)
        stopwatch.watch("sync", lambda: sync.waited_s)
        self._before_epoch: Part = "start"
        if start.run and start.run == task.run_id:
            stopwatch.resume(start.spent)
            self._before_epoch = "recovery"
        self._first_step, self._saved_step = 0, start.step if start.point is None else start.point.saved
        self._epoch_is_over = False  # its steps are made
        self._row: Mapping[str, Any] | None = None  # of an epoch whose end is being agreed
        self.resumable = False  # whether a replacement for another rank can continue from `place`
        # Keeps this rank's own state for that, after a step or ahead of its end.
        self.note: Callable[[Place, int, bool], None] | None = None
        self._began = self._seconds = 0.0
        self._warned_slow = False
        self.writes_checkpoints = folder is not None
        self._checkpoints: CheckpointFolder | None = None
        if (asked := options.checkpoint) is not None and (
            worker.rank == 0 or not sync.in_step
        ):  # else another may become first
            self._checkpoints = CheckpointFolder(asked.folder, keep=asked.keep, best=asked.best)

    def run(self) -> None:
        raise NotImplementedError

    def run_until_moved(self) -> bytes | None:
        """Run to the end, or until a worker is given notice; None at the end.

        Otherwise the checkpoint that other processes go on from: empty if it is in the folder, or no step was
        made.
        """
        try:
            self.run()
        except _Moved as moved:
            return moved.checkpoint
        return None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Wait for the last checkpoint when the block ends; its error is raised unless there is another."""
        try:
            yield
        except BaseException:
            with suppress(Exception):
                self._wait_for_writer()
            raise
        with self.stopwatch.timing("checkpoint"):
            self._wait_for_writer()

    def goes_on(self, epoch: int, *, done: int = 0, begins: bool = False) -> bool:
        """Whether to begin the step after `done` of the epoch, or with `begins` the epoch.

        After an interrupt all end alike. Workers that do not meet in steps all begin the last epoch that
        any has begun: they meet at its end. If the run moves to other processes, this raises instead.
        """
        in_step = self.sync.in_step
        number, whole = self.replica.step + 1 if in_step else epoch, in_step or begins
        self.halted = not self.worker.go_on(number, whole=whole)
        if self.halted and self.worker.moves:
            raise _Moved(self._leave(epoch, done))
        return not self.halted

    def _leave(self, epoch: int, done: int) -> bytes:
        """Save the run after step `done` of the epoch, or before it; return what is not in the folder."""
        self.guard.look()
        self.step_log.flush()
        self.stopwatch.lap("steps")
        if self.replica.step == self._saved_step:
            self._wait_for_writer()  # its error must not be missed
            return b""
        local_states = self.worker.to_first(self.replica.local_state()) if done else ()
        fields: dict[str, Any] = {"step_in_epoch": done}
        if not done:
            self.replica.epoch = epoch - 1  # where ranks meet again at its beginning, it has begun
        else:
            fields["seconds"] = time.perf_counter() - self._began
        if self.writes_checkpoints:
            self._save(local_states, **fields)
            self._wait_for_writer()
            return b""
        replica = self.sync.whole(self.replica)
        if not self.worker.leads:
            return b""
        return b"".join(pack(self._header(replica, **fields), replica.freeze()(), local_states))

    def begin_epoch(self, epoch: int) -> int:
        """Begin an epoch, or resume the one the run starts in; return the steps it has made."""
        start, replica = self.start, self.replica
        self.stopwatch.lap(self._before_epoch)
        self._before_epoch = "other"
        resumes = start.within_epoch and epoch == start.epoch
        done = start.step_in_epoch if resumes else 0
        self._began = time.perf_counter() - (start.seconds if resumes else 0.0)
        self._first_step = replica.step - done
        if not resumes or start.point is None:
            replica.begin_epoch(epoch)
        if resumes and start.point is not None:
            self._go_to(start.point)
        elif resumes and len(start.local_states) == self.worker.size:
            replica.load_local_state(start.local_states[self.worker.rank])
        elif resumes:  # states of another number of ranks
            replica.join_local_states(start.local_states, size=self.worker.size)
        self.guard.begin_epoch()
        epochs = None if self.options.endless else self.last_epoch
        self.progress.begin(epoch=epoch, epochs=epochs, steps=self.expected_steps, step=done)
        self._epoch_is_over = resumes and start.point is not None and start.point.over
        self.resumable = True
        return done

    def _go_to(self, point: Point) -> None:
        replica = self.replica
        if point.state:
            replica.load_state(point.state)
            if point.buffers:
                replica.assign({"buffers": point.buffers})
            replica.begin_epoch(replica.epoch)
        if point.snapshot is not None:
            snapshot, replica.epoch_rows = point.snapshot
            replica.restore(snapshot)

    @property
    def place(self) -> Place:
        """The last whole step."""
        replica = self.replica
        return Place(replica.epoch, replica.step - self._first_step, replica.step)

    def point(self) -> tuple[dict[str, Any], bytes]:
        """What a replacement continues from, at `place`: header, buffers and the replica's state."""
        replica = self.replica
        seconds = time.perf_counter() - self._began
        header = self._header(replica, step_in_epoch=self.place.done, seconds=seconds)
        fields = {
            "header": header,
            "over": self._epoch_is_over,
            "row": self._row,
            "buffers": replica.buffers_before,
            "saved": self._saved_step,
        }
        self._wait_for_writer()  # the replica freezes into memory that the writer still reads
        return fields, replica.state()

    def go_back(self, start: Start) -> None:
        """Continue from here when `run` is called again."""
        assert start.point is not None, "ranks have met there"
        self.start, self._saved_step = start, start.point.saved
        self._before_epoch = "recovery"

    def ends_within_epoch(self) -> bool:
        return self._ends(Progress(epoch=self.replica.epoch, step=self.replica.step))

    def after_step(self, done: int, *, asked: bool) -> None:
        """Write a checkpoint after step `done` of the epoch, but not its last, if one is due or `asked`."""
        replica = self.replica
        # Where workers do not meet in steps, no moment within an epoch is the same on all of them.
        if not self.writes_checkpoints or not self.sync.in_step or replica.step == self._saved_step:
            return
        if asked or self.options.writes_checkpoint(Progress(epoch=replica.epoch, step=replica.step)):
            self.guard.look()
            self.stopwatch.lap("steps")
            local_states = self.worker.to_first(replica.local_state())
            self._save(local_states, step_in_epoch=done, seconds=time.perf_counter() - self._began)
            self.stopwatch.lap("checkpoint")

    def catch_up(self) -> None:
        """After an epoch's steps: leave all workers with the same model, before it is evaluated."""
        self.guard.look()
        self.step_log.flush()
        self.sync.catch_up(self.replica)
        if not self.sync.in_step and self.worker.size > 1:  # an interrupt may find one at the epoch's end
            self.halted = self.worker.total([self.halted]) != [0]
        self.replica.merge_buffers()
        self._seconds = time.perf_counter() - self._began
        self.stopwatch.lap("steps")

    def row(self, epoch: int, rows: int, logs: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "steps": self.replica.step - self._first_step,
            "num_samples": rows,
            **logs,
            "seconds": self._seconds,
            "rows_per_s": rows / self._seconds if self._seconds else 0.0,
            **self.sync.figures(),
            **self.guard.figures(),
        }

    def end_epoch(self, row: dict[str, Any], *, stopped: str | None, asked: bool = False) -> None:
        """Record an epoch; sets `is_over` if it is the last. `stopped` is why a callback ends the run."""
        replica, worker = self.replica, self.worker
        if self.halted:
            self.is_over = True
            if not row["steps"]:
                replica.epoch = row["epoch"] - 1  # it has not begun
                return
        self.rows.append(row)
        if not self.halted:
            progress = end_of_epoch(replica.epoch, replica.step, row)
            triggered = self._ends(progress)
            self.is_over = stopped is not None or triggered or row["epoch"] >= self.last_epoch
            with self.stopwatch.timing("checkpoint"):
                if self.writes_checkpoints and (asked or self.options.writes_checkpoint(progress)):
                    self._save((), last=self.is_over, stopped=stopped)
                replica.wait_for_copy()
            self.sync.next_epoch(replica, row)
        if worker.leads:
            self.stopwatch.lap("other")
            spent = self.stopwatch.seconds
            worker.report("epoch", row=row, step=replica.step, whole=not self.halted, spent=spent)
        if worker.replaceable and not self.halted:  # let a replacement for this process continue from here
            with self.stopwatch.timing("checkpoint"):
                self._wait_for_writer()  # the replica freezes into memory that the writer still reads
                worker.keep(b"".join(pack(self._header(replica, stopped=stopped), replica.freeze()())))

    def _ends(self, progress: Progress) -> bool:
        most, trigger = self.sync.ends_at, self.options.stop_when
        return (most is not None and progress.step >= most) or (trigger is not None and trigger(progress))

    def _save(self, local_states: Sequence[bytes], *, last: bool = False, **fields: Any) -> None:
        replica = self.sync.whole(self.replica)  # workers may have to meet for it
        self._saved_step = replica.step
        if self._checkpoints is None or not self.worker.leads:
            return
        header = self._header(replica, **fields)
        self._wait_for_writer()  # the replica freezes into memory that the writer still reads
        then = partial(self._report_saved, header, last, began=time.perf_counter())
        self._checkpoints.save(header, replica.freeze(), local_states, then=then)

    def _report_saved(self, header: Header, last: bool, *, began: float) -> None:
        """Tell the driver that it may restart workers from here, or that it takes too long to write."""
        seconds, notice_s = time.perf_counter() - began, self.task.config.settings.notice_s
        if seconds > notice_s and self.sync.in_step and not self._warned_slow:
            self._warned_slow = True
            self.worker.report(
                "warning",
                message=f"a checkpoint takes {seconds:.1f} s to write, and a worker that is given notice has"
                f" {notice_s:g} s (RunSettings(notice_s=...)): the run would continue from an earlier one.\n"
                "Hint: write to a faster folder, or divide the state with strategy='fsdp'.",
            )
        if header.ends_epoch and not self.worker.replaceable:
            self.worker.report("saved", epoch=header.epoch, ends=last)

    def _header(self, replica: Any, **fields: Any) -> Header:
        task, options, start = self.task, self.options, self.start
        return Header(
            framework=task.framework,
            epoch=replica.epoch,
            step=replica.step,
            run=task.run_id,
            first_epoch=start.first_epoch,
            first_step=start.first_step,
            counts=tuple(self.train.counts),
            marks=tuple(self.train.marks),
            lanes=task.dealing.lanes if task.dealing is not None else 0,
            workers=task.dealing.workers if task.dealing is not None else 0,
            batch_size=options.batch_size,
            steps_per_epoch=options.steps_per_epoch,
            seed=task.config.seed,
            shuffle=options.shuffle,
            spent=dict(self.stopwatch.seconds),
            rows=tuple(dict(row) for row in self.rows),
            callbacks=callback_states(self.stateful),
            **fields,
        )

    def _wait_for_writer(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.wait()


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
        self._worker, self._active, self._waited_s = worker, show and worker.rank == 0, waited_s
        self._data_key = "transform_s" if prepares else "data_s"
        self._fixed: dict[str, Any] = {}
        self._began = self._reported = self._waited_before = self._data_before = 0.0
        self.data_s = 0.0
        self._rows = 0

    def begin(
        self, *, epoch: int, epochs: int | None, steps: int | None, step: int = 0, quiet: bool = False
    ) -> None:
        """Begin an epoch, or resume it at `step`; reported at once unless `quiet`."""
        self._began = self._reported = time.perf_counter()
        self._waited_before = self._waited_s()
        self._data_before, self._rows = self.data_s, 0
        self._fixed = {"epoch": epoch, "steps": steps} | ({} if epochs is None else {"epochs": epochs})
        if self._active and not quiet:
            self._report(step, None, {})

    def took_data(self, seconds: float) -> None:
        self.data_s += seconds

    def step(self, step: int, rows: int, metrics: Callable[[], tuple[float, Mapping[str, float]]]) -> None:
        """Count step number `step` of this epoch; `metrics` is called only if they are reported."""
        self._rows += rows
        if self._active and time.perf_counter() - self._reported > limits.PROGRESS_S:
            self._report(step, *metrics())

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
            **{self._data_key: self.data_s - self._data_before},
            sync_s=self._waited_s() - self._waited_before,
        )


class StepReporter:
    """Reports the loss of every step, from every rank and several steps at a time."""

    def __init__(self, worker: Group, *, active: bool) -> None:
        self._worker, self.active = worker, active
        self._reported = time.perf_counter()
        self._first = 0
        self._steps: list[tuple[float, float, float]] = []

    def step(self, step: int, *, loss: float, rows: float, lr: float) -> None:
        """`rows` is the weight of the mean: rows, or whatever else the loss is a mean of."""
        if not self._steps:
            self._first = step
        self._steps.append((loss if rows else 0.0, rows, lr))
        if time.perf_counter() - self._reported > limits.STEP_LOSSES_S:
            self.flush()

    def flush(self) -> None:
        self._reported = time.perf_counter()
        if self._steps:
            loss, rows, lr = map(list, zip(*self._steps, strict=True))
            rank = self._worker.rank
            self._worker.report("steps", rank=rank, first=self._first, loss=loss, rows=rows, lr=lr)
            self._steps = []
