"""The run on one worker: every rank calls `run`, makes as many steps as the others and ends epochs with them.

Which framework steps the model and how replicas agree is not known here; see `frameworks/contract.py` and
`sync/contract.py`. Where training goes on from is in `run_start.py`, checkpoints are the
business of `checkpoint_writer.py`, and what the driver hears meanwhile of `reporting.py`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import cloudpickle
import numpy as np

from kindler.data.batches import Batch, Rows
from kindler.engine.placement import Placement
from kindler.frameworks.base import BaseReplica
from kindler.frameworks.devices import explained
from kindler.group import Group
from kindler.sync.contract import Sync
from kindler.train.callbacks import Callback, Run
from kindler.train.checkpoint_writer import CheckpointWriter, restore_callbacks
from kindler.train.joining import joined
from kindler.train.loss_guard import LossGuard
from kindler.train.reporting import ProgressReporter, StepReporter
from kindler.train.run_start import (
    Start,
    begin,
    build_replica,
    last_step,
    load_local_states,
    open_batch_stream,
    over_already,
    taken_over,
)
from kindler.train.task import Task
from kindler.train.triggers import Progress, end_of_epoch


def run(worker: Group, task_bytes: bytes, spec: bytes, *states: bytes) -> Sequence[bytes]:
    """Train or evaluate; rank 0 returns the history (or figures) as JSON, and the model's state.

    `states` is the model's state (empty for a new one), then checkpoints to go on from, best first.
    """
    task: Task = cloudpickle.loads(task_bytes)
    placed = worker.place(task.device, share=task.share_gpus)
    with explained(), _process_group(worker, task, placed):
        data = open_batch_stream(worker, task, task.data, "data", trains=task.trains)
        replica: BaseReplica = build_replica(
            worker,
            task,
            placed,
            spec,
            feature_names=data.features,
            label_names=data.labels,
            label_shapes=None if data.label_shapes is None else list(data.label_shapes),
        )
        _weigh(replica, task)
        if (inputs := data.no_rows()) is not None:
            replica.expect(inputs)
        data.held_by(replica.hold)
        start = begin(replica, task, states, rank=worker.rank, counts=data.counts, marks=data.marks)
        if len(states) == 1:  # a new run: what its user has frozen since the last one counts
            replica.restore_requires_grad()
        del states  # as large as the model
        with closing(data):
            if task.trains:
                with joined(worker, task, replica, ends_at=last_step(task, start)) as sync:
                    rows = _Fit(worker, task, replica, data, start, sync).run()
                    whole = sync.whole(replica)  # on all workers: they may have to meet for it
                    state = whole.state() if worker.leads else b""
            else:
                tell = "validation" if task.log_steps else None
                rows, state = [_judged(worker, replica, data, show=task.show, tell=tell)], b""
        if not worker.leads:
            return [b"", b""]
        told = {"rows": rows, "layout": data.layout, "mode": replica.mode, "step": replica.step}
        return [json.dumps(told).encode(), state]


def _process_group(worker: Group, task: Task, placed: Placement) -> AbstractContextManager[None]:
    if not task.process_group:
        return nullcontext()
    from kindler.frameworks.torch.exchange_network import process_group

    return process_group(worker, shared_gpus=placed.shared, timeout_s=task.settings.sync_timeout_s)


def _weigh(replica: BaseReplica, task: Task) -> None:
    """Let the losses of rows be weighed, if that was asked for."""
    if not task.trains:
        return
    classes, column = task.training.class_weight, task.training.columns.weight_col is not None
    if classes or column:
        replica.weigh_rows(classes, column=column)


class _Fit:
    """Training, from where it stands to its end."""

    def __init__(
        self, worker: Group, task: Task, replica: BaseReplica, train: Rows, start: Start, sync: Sync
    ) -> None:
        self._worker, self._replica, self._train = worker, replica, train
        self._sync = sync
        self._validation = (
            open_batch_stream(worker, task, task.validation, "validation_data", trains=False)
            if task.validation
            else None
        )
        if self._validation is not None:
            self._validation.held_by(replica.hold)
        start = self._start = taken_over(worker, replica, task, start, train)
        self._task, options = task, task.training
        self._options = options
        self._steps = options.steps_per_epoch or train.steps
        self._expected = options.steps_per_epoch or train.expected
        self._last_epoch = start.first_epoch + options.epochs_to_train
        self._last_step = math.inf if sync.ends_at is None else sync.ends_at
        self._hooks: Sequence[Callback] = options.callbacks
        self._view = Run(
            rank=worker.rank,
            size=worker.size,
            replica=replica,
            steps=self._expected,
            framework=task.framework,
        )
        self._view.epoch, self._view.step = start.epoch, start.step
        self._guard = LossGuard(
            options.on_nan,
            rank=worker.rank,
            tell=lambda message: worker.report("bad_loss", message=message),
        )
        self._keeper = CheckpointWriter(
            worker,
            task,
            counts=train.counts,
            marks=train.marks,
            start=start,
            callbacks=options.callbacks,
            anywhere=not sync.in_step,
            whole=sync.whole,
            look=self._guard.look,
        )
        # One worker may ask for a checkpoint where others do not; who has no step hooks cannot ask. They
        # agree where they exchange gradients: the driver is not in the way of a step.
        several = worker.size > 1 and sync.in_step
        self._agree_each_step = self._keeper.active and several and _look_at_steps(self._hooks)
        self._progress = ProgressReporter(
            worker,
            show=task.show,
            waited_s=lambda: sync.waited_s,
            prepares=train.prepares,
        )
        self._step_log = StepReporter(worker, active=task.log_steps)
        self._halted = False
        replica.watch_losses(self._guard)

    def run(self) -> list[dict[str, Any]]:
        """The run's rows of the history, those of its earlier part included."""
        rows = [dict(row) for row in self._start.rows]
        view, done = self._view, self._start.step_in_epoch
        with self._keeper, closing(self._validation) if self._validation is not None else nullcontext():
            self._gather_for_hooks()
            self._each("on_run_begin")
            restore_callbacks(self._hooks, self._start.callbacks)
            over = self._start.stopped is not None or over_already(self._task, self._start)
            epoch = self._start.epoch if done else self._start.epoch + 1
            while not over and epoch <= self._last_epoch and self._replica.step < self._last_step:
                if not self._goes_on(epoch):
                    break
                view.epoch = epoch
                row = self._epoch(epoch, done)
                over = self._halted or self._end_epoch(row)
                if self._halted and not row["steps"]:
                    self._replica.epoch = epoch - 1  # it has not begun
                    break
                rows.append(row)
                epoch, done = epoch + 1, 0
            self._each("on_run_end")
        return rows

    def _epoch(self, epoch: int, done: int) -> dict[str, Any]:
        """One epoch, or the rest of one of which `done` steps are made; its row of the history."""
        replica, first_step = self._replica, self._replica.step - done
        started = time.perf_counter() - (self._start.seconds if done else 0.0)
        replica.begin_epoch(epoch)
        if done:
            load_local_states(replica, self._start.local_states, self._worker)
        self._each("on_epoch_begin")
        epochs = None if self._options.endless else self._last_epoch
        self._progress.begin(epoch=epoch, epochs=epochs, steps=self._expected, step=done)
        self._sync.begin_epoch(replica)
        self._guard.begin_epoch()
        stretch = self._train.stretch(epoch, done=done, steps=self._options.steps_per_epoch)
        with closing(stretch) as batches:
            while self._goes_on(epoch) and (batch := self._next(batches)) is not None:
                done += 1
                self._step(batch, done)
                if done == self._steps or batch.ends or self._over_within_epoch():
                    break
                if self._sync.in_step:  # otherwise no moment within an epoch is the same on all workers
                    seconds = time.perf_counter() - started
                    asked = self._asked_for_checkpoint()
                    self._keeper.after_step(replica, step_in_epoch=done, seconds=seconds, asked=asked)
                if self._hooks:  # they may do with the weights what they like
                    replica.wait_for_copy()
        self._guard.look()
        if self._halted and done and self._sync.in_step:
            seconds = time.perf_counter() - started
            self._keeper.after_step(replica, step_in_epoch=done, seconds=seconds, asked=True)
        self._step_log.flush()
        self._sync.catch_up(replica)
        replica.merge_buffers()
        logs = _merged(self._worker, replica, tell="train" if self._step_log.active else None)
        seconds = time.perf_counter() - started
        rows = logs.pop("num_samples")
        row = {
            "epoch": epoch,
            "steps": replica.step - first_step,
            "num_samples": int(rows),
            **logs,
            "seconds": seconds,
            "rows_per_s": rows / seconds if seconds else 0.0,
            **self._sync.figures(),
            **self._skipped(),
        }
        if self._halted:
            if row["steps"] and self._worker.leads:
                self._worker.report("epoch", row=row, step=replica.step, whole=False)
        elif self._validation is not None and self._options.validates(epoch):
            row |= self._validated(self._validation)
        return row

    def _goes_on(self, epoch: int) -> bool:
        """Whether to begin the next step; not if the user has interrupted, where all workers end alike."""
        in_step = self._sync.in_step
        self._halted = not self._worker.go_on(self._replica.step + 1 if in_step else epoch, whole=in_step)
        return not self._halted

    def _skipped(self) -> dict[str, int]:
        """Steps that were left out: the same on all workers."""
        return self._guard.figures()

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        began = time.perf_counter()
        batch = next(batches, None)
        self._progress.took_data(time.perf_counter() - began)
        return batch

    def _step(self, batch: Batch, number: int) -> None:
        replica, view = self._replica, self._view
        self._each("on_step_begin")
        if self._step_log.active:
            self._logged_step(batch)
        else:
            self._sync.step(replica, batch)
        self._worker.tick()
        view.step = replica.step
        self._each("on_step_end")
        self._progress.step(number, batch.global_rows, self._running)

    def _logged_step(self, batch: Batch) -> None:
        replica = self._replica
        rate, (loss, weight) = replica.learning_rate(), replica.loss_sums()
        self._sync.step(replica, batch)
        loss_now, weight_now = replica.loss_sums()
        mean = (loss_now - loss) / (weight_now - weight) if weight_now > weight else 0.0
        self._step_log.step(replica.step, loss=mean, rows=weight_now - weight, lr=rate)

    def _running(self) -> tuple[float, Mapping[str, float]]:
        return self._replica.running_loss(), self._replica.running_metrics()

    def _validated(self, validation: Rows) -> dict[str, Any]:
        self._each("on_validation_begin")
        tell = "validation" if self._step_log.active else None
        logs = _judged(self._worker, self._replica, validation, tell=tell)
        named = {f"val_{name}": value for name, value in logs.items()}
        self._each("on_validation_end", named)
        return named

    def _end_epoch(self, row: dict[str, Any]) -> bool:
        """What follows an epoch; whether the run is over."""
        replica, view = self._replica, self._view
        replica.end_epoch(row)
        self._gather_for_hooks()
        self._each("on_epoch_end", row)
        asked = self._agree()
        progress = end_of_epoch(replica.epoch, replica.step, row)
        self._keeper.after_epoch(replica, progress, row, stopped=view.stopping, asked=asked)
        replica.wait_for_copy()
        self._sync.next_epoch(replica, row)
        if self._worker.leads:
            self._worker.report("epoch", row=row, step=replica.step)
        self._keeper.epoch_is_over(replica, stopped=view.stopping)
        return view.stopping is not None or self._triggered(progress)

    def _gather_for_hooks(self) -> None:
        """One of them may write a checkpoint by itself, and on the first worker only."""
        if self._hooks:
            self._sync.whole(self._replica)

    def _agree(self) -> bool:
        """A callback may decide by what only its own worker knows: all stop, and save, when one does."""
        if not self._hooks:
            return False
        mine = {"stop": self._view.stopping, "save": self._view.take_save_request()}
        told = [json.loads(part) for part in self._worker.all_gather(json.dumps(mine).encode()) if part]
        if reason := next(filter(None, (part["stop"] for part in told)), None):
            self._view.stop(reason)
        return any(part["save"] for part in told)

    def _asked_for_checkpoint(self) -> bool:
        if not self._agree_each_step:
            return self._view.take_save_request()
        [asked] = self._sync.collective.sum([np.array([self._view.take_save_request()], np.int64)])
        return bool(asked[0])

    def _triggered(self, progress: Progress) -> bool:
        trigger = self._options.end_trigger
        return trigger is not None and trigger(progress)

    def _over_within_epoch(self) -> bool:
        step = self._replica.step
        return step >= self._last_step or self._triggered(Progress(epoch=self._view.epoch, step=step))

    def _each(self, name: str, *args: Any) -> None:
        for hook in self._hooks:
            getattr(hook, name)(self._view, *args)


def _judged(
    worker: Group, replica: BaseReplica, data: Rows, *, show: bool = False, tell: str | None = None
) -> dict[str, Any]:
    """Each row once, without training; the figures over all workers."""
    progress = ProgressReporter(worker, show=show)
    progress.begin(epoch=1, epochs=1, steps=data.expected, quiet=True)
    with closing(data.stretch(0)) as batches:
        for step, batch in enumerate(batches, start=1):
            replica.eval_step(batch)
            worker.tick()
            progress.step(
                step, batch.global_rows, lambda: (replica.running_loss(), replica.running_metrics())
            )
    return _merged(worker, replica, tell=tell)


def _merged(worker: Group, replica: BaseReplica, *, tell: str | None = None) -> dict[str, Any]:
    """The figures over all workers; with `tell`, the driver also hears those of each."""
    tallies = replica.take_tallies()
    if tell is not None:
        own = replica.merge_tallies([tallies])
        worker.report("worker", rank=worker.rank, part=tell, epoch=replica.epoch, figures=own)
    return worker.merged_by_first(tallies, replica.merge_tallies)


def _look_at_steps(hooks: Sequence[Callback]) -> bool:
    names = ("on_step_begin", "on_step_end")
    return any(getattr(type(hook), name) is not getattr(Callback, name) for hook in hooks for name in names)
