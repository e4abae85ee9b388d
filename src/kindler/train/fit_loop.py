"""The run on one worker of a framework that has its own loop, such as Keras: this follows its `fit`.

Every rank calls `run` and makes the same steps at the same time. `loop.py` is its counterpart.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeAlias

import cloudpickle
import numpy as np

from kindler.collective import Batch
from kindler.data.batches import Rows
from kindler.frameworks.devices import explained
from kindler.group import Group
from kindler.sync.contract import Sync
from kindler.train.checkpoints import restore_callbacks
from kindler.train.joining import joined
from kindler.train.ledger import EpochLedger, ProgressReporter
from kindler.train.loss_guard import OnNan
from kindler.train.options import Task
from kindler.train.rows import open_indexed_batches
from kindler.train.run_start import (
    Start,
    begin,
    build_replica,
    last_step,
    taken_over,
)

if TYPE_CHECKING:
    from kindler.frameworks.keras.replica import KerasReplica

_REMEMBERED = 1024  # steps whose rows can be named: more than losses wait to be looked at
_SHOWN_ROWS = 8


def run(worker: Group, task_bytes: bytes, spec: bytes, *states: bytes) -> Sequence[bytes]:
    """Train or evaluate; rank 0 returns the history (or metrics) as JSON, and the model's state."""
    # TensorFlow, for one, keeps generated code in temporary files that only an orderly exit removes.
    tempfile.tempdir = str(worker.scratch)
    task: Task = cloudpickle.loads(task_bytes)
    placed = worker.place(task.config.device, share=task.config.share_gpus)
    with explained():
        replica: KerasReplica = build_replica(worker, task, placed, spec)
        # Not before the replica: making data may compute, and then it is too late to settle threads.
        data = open_indexed_batches(worker, task, task.data, "data", trains=task.trains)
        with closing(data):
            rows, state = _run(worker, task, replica, data, states)
    if not worker.leads:
        return [b"", b""]
    return [json.dumps({"rows": rows, "layout": data.layout, "step": replica.step}).encode(), state]


def _run(
    worker: Group, task: Task, replica: KerasReplica, data: Rows, states: Sequence[bytes]
) -> tuple[list[dict[str, Any]], bytes]:
    replica.arrange(data.features, data.labels, by_name=data.by_name)
    sample = data.sample()
    replica.build(sample.features, sample.labels, may_idle=data.may_idle)
    if worker.size > 1:
        for message in replica.try_metrics(sample):
            if worker.leads:
                worker.report("warning", message=message)
    start = begin(replica, task, states, rank=worker.rank, counts=data.counts, marks=data.marks)
    if not task.trains:
        return [_evaluated(worker, replica, data)], b""
    if task.validation is None:
        return _fit(worker, task, replica, data, None, start)
    validation = open_indexed_batches(worker, task, task.validation, "validation_data", trains=False)
    with closing(validation):
        return _fit(worker, task, replica, data, validation, start)


def _fit(
    worker: Group,
    task: Task,
    replica: KerasReplica,
    train: Rows,
    validation: Rows | None,
    start: Start,
) -> tuple[list[dict[str, Any]], bytes]:
    with joined(worker, task, replica, ends_at=last_step(task, start)) as sync:
        sync.share_steps(replica)
        start = taken_over(worker, replica, task, start, train)
        follower = _Follower(worker, task, replica, train, validation, start, sync)
        with follower.ledger.checkpoints:
            follower.follow()
        whole = sync.whole(replica)  # on all workers: they may have to meet for it
        return follower.ledger.rows, whole.state() if worker.leads else b""


def _evaluated(worker: Group, replica: KerasReplica, data: Rows, hooks: Any = None) -> dict[str, Any]:
    replica.evaluate(_Picked(worker, data, data.own_steps(), replica.look_at), hooks)
    figures = _merged(worker, replica)
    rows = worker.total([data.rows_of(0, data.steps or 0)[0]])[0] if worker.lost else None
    return {**figures, "num_samples": data.rows_of_all(0, data.steps or 0) if rows is None else rows}


_Look: TypeAlias = Callable[[Batch], None]


class _Picked:
    def __init__(self, worker: Group, data: Rows, numbers: Sequence[int], look_at: _Look) -> None:
        self._worker, self._data, self._numbers, self._look_at = worker, data, numbers, look_at
        self.varies = data.varies

    def __len__(self) -> int:
        return len(self._numbers)

    def batch(self, number: int) -> tuple[Any, Any]:
        self._worker.tick()
        batch = self._data.batch(self._numbers[number])
        self._look_at(batch)
        return batch.features, batch.labels


class _Stretch:
    """The steps of the current epoch: `length` of them, from `first` in the stream of all passes."""

    def __init__(self, worker: Group, data: Rows, reporter: ProgressReporter, look_at: _Look) -> None:
        self._worker, self._data, self._reporter, self._look_at = worker, data, reporter, look_at
        self.varies = data.varies
        self._lock = threading.Lock()  # Keras asks from a thread of its own, and now and then from two
        self._named: dict[int, tuple[Callable[[int], int | str] | None, int]] = {}
        self.first = self.length = 0

    def __len__(self) -> int:
        return self.length

    def batch(self, number: int) -> tuple[Any, Any]:
        with self._lock:
            began = time.perf_counter()
            batch = self._data.batch(self.first + number)
            self._reporter.took_data(time.perf_counter() - began)
            self._named[self.first + number] = (batch.where, batch.rows)
            if len(self._named) > _REMEMBERED:
                self._named.pop(next(iter(self._named)))
        self._worker.tick()
        self._look_at(batch)
        return batch.features, batch.labels

    def rows_of(self, number: int) -> list[int | str]:
        """The names of a step's first rows; empty if they have none."""
        where, rows = self._named.get(number, (None, 0))
        return [] if where is None else [where(row) for row in range(min(rows, _SHOWN_ROWS))]


class _Follower:
    """Follows the framework's loop through a run; implements the contract `Watch`."""

    def __init__(
        self,
        worker: Group,
        task: Task,
        replica: KerasReplica,
        train: Rows,
        validation: Rows | None,
        start: Start,
        sync: Sync,
    ) -> None:
        options = self._options = task.training
        self._worker, self._replica, self._sync = worker, replica, sync
        self._train, self._validation, self._start = train, validation, start
        self._remembering = [replica.remembering(callback) for callback in options.callbacks]
        # A callback of Keras's own may end the run at such a loss, which is then what its user wants.
        ends_itself = any(type(callback).__name__ == "TerminateOnNaN" for callback in options.callbacks)
        on_nan: OnNan = "warn" if ends_itself and options.on_nan == "raise" else options.on_nan
        self.ledger = EpochLedger(
            worker, task, replica, sync, train, start, callbacks=self._remembering, on_nan=on_nan
        )
        self._steps: int = self.ledger.steps or 0
        self._runs_ahead = replica.runs_ahead
        self._stretch = _Stretch(worker, train, self.ledger.progress, replica.look_at)
        self._done = self._base = 0
        self._opening = False
        self._mean = 0.0

    def follow(self) -> None:
        start, replica, options, last = self._start, self._replica, self._options, self.ledger.last_epoch
        if self.ledger.is_over:
            return
        hooks = replica.hooks(options.callbacks, self, size=self._worker.size, epochs=last, steps=self._steps)
        epoch = start.epoch
        if not self.ledger.goes_on(epoch if start.step_in_epoch else epoch + 1):
            return
        if start.step_in_epoch:
            hooks.offset, hooks.closes = start.step_in_epoch, False
            self._stretch.first = (epoch - 1) * self._steps + start.step_in_epoch
            self._stretch.length = self._steps - start.step_in_epoch
            replica.fit(
                self._stretch,
                hooks,
                epochs=(epoch - 1, epoch),
                class_weight=options.class_weight,
                ends=epoch == last,
            )
            hooks.opens, hooks.closes = False, True
            if replica.stopping or epoch == last:
                hooks.on_train_end()
                return
        if epoch < last:
            self._stretch.first, self._stretch.length = epoch * self._steps, self._steps
            replica.fit(self._stretch, hooks, epochs=(epoch, last), class_weight=options.class_weight)

    def train_begins(self) -> None:
        """Callbacks forget their state in their own `on_train_begin`, so restore it after that."""
        restore_callbacks(self._remembering, self._start.callbacks)

    def epoch_begins(self, epoch: int) -> None:
        """Keras's epoch `epoch` is the run's `epoch + 1`."""
        self._base = epoch * self._steps
        self._done = self.ledger.begin_epoch(epoch + 1)
        self._stretch.first = self._base + self._done
        self._replica.epoch_rows = self._rows_of(0, self._done)[0]
        self._opening = True
        self._mean = self._replica.tallies.figures().get("loss", 0.0) if self._done else 0.0

    def step_begins(self) -> None:
        if self._opening:  # not earlier: the callbacks of the epoch's beginning may have changed the rate
            self._sync.begin_epoch(self._replica)
            self._opening = False
        self._replica.begin_step()
        if self.ledger.guard.skips:
            self._replica.keep_step()

    def step_ends(self, steps: int, logs: Any) -> bool:
        steps = min(steps, self._steps)  # Keras rounds up to whole executions
        own, everybody = self._rows_of(self._done, steps)
        self._replica.step += steps - self._done
        self._look_at_loss(steps, logs, own=own)
        self._sync.stepped(self._replica, own)
        self._done = steps
        self._worker.tick()
        self.ledger.progress.step(steps, everybody, lambda: _running(logs))
        if self.ledger.step_log.active:
            self._log_step(logs, own)
        self._replica.epoch_rows += own
        ends = self.ledger.ends_within_epoch()
        if steps < self._steps and not ends:
            ends = not self.ledger.goes_on(self._replica.epoch)
            self.ledger.after_step(steps, asked=self.ledger.halted)
        return ends

    def _look_at_loss(self, steps: int, logs: Any, *, own: int) -> None:
        """Apply `fit(on_nan=...)`; the loss that Keras reports is the mean of the epoch so far."""
        names = _names_of_losses(logs) if own else []  # without rows it is that of made-up ones
        stretch, number = self._stretch, self._base + steps - 1
        guard = self.ledger.guard

        def described() -> tuple[list[int | str], str]:
            return stretch.rows_of(number), ""

        if not guard.skips and self._runs_ahead:
            for name in names:
                guard.note(self._replica.step, logs.later(name), described, logs.floats)
            return
        # At once: other workers would see NaN in the next step, and could be first.
        sound = all(guard.saw(self._replica.step, float(logs.later(name)), described) for name in names)
        if not guard.skips:
            return
        sound = self._replica.step_is_finite() and sound  # which waits for the step to end
        if self._worker.size > 1:
            [bad] = self._sync.collective.sum([np.array([not sound], np.int64)])
            sound = not bad[0]
        if not sound:
            self._replica.undo_step()
            guard.skip()

    def epoch_ends(self, epoch: int, logs: dict[str, Any], hooks: Any) -> None:
        """Before the user's callbacks: metrics of all ranks, validation included."""
        replica, worker = self._replica, self._worker
        self.ledger.catch_up()
        if worker.size > 1:
            merged = _merged(worker, replica)
            logs.update(_agreed(worker, {name: v for name, v in logs.items() if name not in merged}))
            logs.update({name: value for name, value in merged.items() if name in logs})
        if self._validation is not None and self._options.validates(epoch + 1) and not self.ledger.halted:
            evaluated = _evaluated(worker, replica, self._validation, hooks)
            logs.update({f"val_{name}": value for name, value in evaluated.items()})

    def epoch_over(self, epoch: int, logs: dict[str, Any], asked_to_stop: bool) -> bool:
        worker, ledger = self._worker, self.ledger
        row = ledger.row(epoch + 1, self._rows_of_epoch(), logs)
        if self._options.callbacks and worker.size > 1:
            asked_to_stop = worker.total([int(asked_to_stop)]) != [0]
        ledger.end_epoch(row, stopped="a callback asked for it" if asked_to_stop else None)
        return ledger.is_over or not ledger.goes_on(epoch + 2)

    def _rows_of_epoch(self) -> int:
        """Rows that all workers used; where they do not step together, each made its own steps."""
        if not self._sync.in_step and self._worker.size > 1:
            return self._worker.total([self._replica.epoch_rows])[0]
        return self._train.rows_of_all(self._base, self._base + self._done)

    def _rows_of(self, first: int, last: int) -> tuple[int, int]:
        return self._train.rows_of(self._base + first, self._base + last)

    def _log_step(self, logs: Any, own: int) -> None:
        """Keras reports the mean over the epoch so far; derive the step's own loss from it."""
        mean = float(logs["loss"]) if "loss" in logs else 0.0
        before = self._replica.epoch_rows
        loss = (mean * (before + own) - self._mean * before) / own if own else 0.0
        self._mean = mean
        self.ledger.step_log.step(self._replica.step, loss=loss, rows=own, lr=self._replica.learning_rate())


def _names_of_losses(logs: Mapping[str, Any]) -> list[str]:
    """A user's own train step may have other losses than "loss"."""
    if "loss" in logs:
        return ["loss"]
    return [name for name in logs if name.lower().endswith("loss")] or list(logs)


def _running(logs: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    figures = dict(logs)
    loss = figures.pop("loss", float("nan"))
    return loss, {name: value for name, value in figures.items() if isinstance(value, int | float)}


def _agreed(worker: Group, figures: dict[str, Any]) -> dict[str, Any]:
    """Average over ranks what a user's own train step returns besides metrics."""

    def means(parts: Sequence[bytes]) -> dict[str, Any]:
        told = [json.loads(part) for part in parts]
        return {
            name: sum(part[name] for part in told) / len(told)
            for name, value in told[0].items()
            if isinstance(value, int | float) and all(name in part for part in told)
        }

    return worker.merged_by_first(json.dumps(figures).encode(), means)


def _merged(worker: Group, replica: KerasReplica) -> dict[str, float]:
    """Metrics over all ranks; their variables hold the merged state afterwards."""
    tallies = replica.tallies
    if worker.outlives:  # the first one may die: everybody merges what came
        came = [part for part in worker.all_gather(tallies.take()) if part]
        return tallies.load(tallies.joined(came))
    states = worker.to_first(tallies.take())
    joined_states = tallies.joined(states) if worker.rank == 0 else b""
    return tallies.load(worker.from_first(joined_states))
