"""The loop of a framework that makes the steps itself, such as Keras: this follows its `fit`.

Every rank makes the same steps at the same time. `step_loop.py` is its counterpart.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kindler.collective import Batch
from kindler.data.batches import Rows
from kindler.group import Group
from kindler.train.checkpoints import restore_callbacks
from kindler.train.loop import Loop, Place
from kindler.train.options import Task

if TYPE_CHECKING:
    from kindler.frameworks.keras.replica import KerasReplica

_REMEMBERED = 1024  # steps whose rows can be named: more than losses wait to be looked at
_SHOWN_ROWS = 8


def prepare(worker: Group, replica: KerasReplica, data: Rows) -> None:
    replica.arrange(data.features, data.labels, by_name=data.by_name)
    sample = data.sample()
    replica.build(sample.features, sample.labels, may_idle=data.may_idle)
    if worker.size > 1:
        for message in replica.try_metrics(sample):
            if worker.leads:
                worker.report("warning", message=message)


def evaluate(
    worker: Group, task: Task, replica: KerasReplica, data: Rows, hooks: Any = None
) -> dict[str, Any]:
    replica.evaluate(_Steps(worker, data, replica.look_at, data.own_steps()), hooks)
    metrics, steps = _merged(worker, replica), data.steps or 0
    own = data.rows_of(0, steps)[0]
    return {**metrics, "num_samples": worker.total([own])[0] if worker.lost else data.rows_of_all(0, steps)}


_Look: TypeAlias = Callable[[Batch], None]


class _Steps:
    """Some steps of the data, for the framework to read by their place among these."""

    def __init__(self, worker: Group, data: Rows, look_at: _Look, numbers: Sequence[int] = ()) -> None:
        self._worker, self._data, self._numbers, self._look_at = worker, data, numbers, look_at
        self.varies = data.varies

    def __len__(self) -> int:
        return len(self._numbers)

    def batch(self, place: int) -> tuple[Any, Any]:
        batch = self._read(place)
        self._worker.tick()
        self._look_at(batch)
        return batch.features, batch.labels

    def _read(self, place: int) -> Batch:
        return self._data.batch(self._numbers[place])


class _EpochSteps(_Steps):
    """The steps of the current epoch: `length` of them, from `first` in the stream of all passes."""

    def __init__(self, loop: FitLoop) -> None:
        super().__init__(loop.worker, loop.train, loop.replica.look_at)
        self._loop = loop
        self._lock = threading.Lock()  # Keras asks from a thread of its own, and now and then from two
        self._named: dict[int, tuple[Callable[[int], int | str] | None, int]] = {}
        self.first = self.length = 0

    def __len__(self) -> int:
        return self.length

    def rows_of(self, number: int) -> list[int | str]:
        """The names of a step's first rows; empty if they have none."""
        where, rows = self._named.get(number, (None, 0))
        return [] if where is None else [where(row) for row in range(min(rows, _SHOWN_ROWS))]

    def _read(self, place: int) -> Batch:
        with self._lock:
            began, number = time.perf_counter(), self.first + place
            batch = self._data.batch(number)
            self._loop.has_read(number, began)
            self._named[number] = (batch.where, batch.rows)
            if len(self._named) > _REMEMBERED:
                self._named.pop(next(iter(self._named)))
        return batch


class FitLoop(Loop):
    """Follows the framework's loop, whose hooks call the methods after `run`."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.sync.share_steps(self.replica)
        self.stateful = [self.replica.remembering(callback) for callback in self.options.callbacks]
        self._length = self.steps or 0
        self._runs_ahead = self.replica.runs_ahead
        self._epoch_steps = _EpochSteps(self)
        self._done = self._base = 0
        self._idle_since = 0.0  # when the last step ended
        self._opening = False
        self._mean = 0.0
        self._hooks: Any = None
        self._asked_to_stop = False
        self.replica.before_exchange = lambda: self._note(self._done + 1, ahead=True)
        self.replica.after_exchange = self._moved

    def run(self) -> None:
        start, replica, length, last = self.start, self.replica, self._length, self.last_epoch
        epoch, done, steps, point = start.epoch, start.step_in_epoch, self._epoch_steps, start.point
        # Within an epoch, and where ranks met again and may not have its state yet, they ask after a step.
        asks = point is None and not done
        if self.is_over or (asks and not self.goes_on(epoch + 1, begins=True)):
            return
        callbacks, weights = self.options.callbacks, self.options.class_weight
        if self._hooks is None:
            options = {"size": self.worker.size, "epochs": last, "steps": length}
            self._hooks = replica.hooks(callbacks, self, **options)
        hooks = self._hooks
        hooks.opens = point is None or start.takes_over
        if start.within_epoch:
            hooks.offset, hooks.closes = done, False
            if point is not None and (point.over or point.row is not None or done == length):
                self._end_epoch_again(point.row)
                if epoch == last:  # as `fit` does
                    replica.optimizer.finalize_variable_values(replica.model.trainable_weights)
            else:
                steps.first, steps.length = (epoch - 1) * length + done, length - done
                replica.fit(steps, hooks, epochs=(epoch - 1, epoch), class_weight=weights, ends=epoch == last)
            hooks.opens, hooks.offset = False, 0
        hooks.closes = True
        if start.within_epoch and (replica.model.stop_training or epoch == last):
            hooks.on_train_end()
        elif epoch < last:
            steps.first, steps.length = epoch * length, length
            replica.fit(steps, hooks, epochs=(epoch, last), class_weight=weights)

    def _end_epoch_again(self, row: Mapping[str, Any] | None) -> None:
        """The end of an epoch whose steps are made; all but the agreement on it, if it has a `row`."""
        epoch, hooks, model = self.start.epoch - 1, self._hooks, self.replica.model
        model.stop_training = False
        hooks.on_train_begin()
        if row is None:
            hooks.on_epoch_begin(epoch)
            hooks.on_epoch_end(epoch, dict(model.get_metrics_result()))
            return
        start = self.start
        if start.point is not None and start.takes_over:
            self.replica.load_state(start.point.state)
            self._first_step = start.step - start.step_in_epoch
        self.start = replace(start, point=None)
        model.stop_training = self._agree_on_end(dict(row))

    def train_begins(self) -> None:
        """Callbacks forget their state in their own `on_train_begin`, so restore it after that."""
        restore_callbacks(self.stateful, self.start.callbacks)

    def epoch_begins(self, epoch: int) -> bool:
        """Keras's epoch `epoch` is the run's `epoch + 1`; returns whether it is new to the callbacks."""
        point = self.start.point
        self._base = epoch * self._length
        self._done = self.begin_epoch(epoch + 1)
        self._epoch_steps.first = self._base + self._done
        self.replica.epoch_rows = self._rows_of(0, self._done)[0]
        self._opening, self._idle_since = True, time.perf_counter()
        self._mean = self.replica.tallies.figures().get("loss", 0.0) if self._done else 0.0
        return point is None or bool(point.state)

    def epoch_has_begun(self) -> None:
        if (point := self.start.point) is not None:
            if point.state and self.options.callbacks:  # what they did is in the state of the others
                self._go_to(point)
            self.start = replace(self.start, point=None)

    def _note(self, steps: int, *, ahead: bool = False) -> None:
        """Keep this rank's own state as that of the end of this step of the epoch."""
        if self.note is not None:
            epoch, done, step = self.place
            rows = self.replica.epoch_rows + self._rows_of(done, steps)[0]
            self.note(Place(epoch, steps, step + steps - done), rows, ahead)

    def _moved(self) -> None:
        self.resumable = False  # from here to the step's end, nothing undoes it

    def step_begins(self) -> None:
        self.replica.begin_step()
        if self._opening:  # not earlier: the callbacks of the epoch's beginning may have changed the rate
            self.sync.begin_epoch(self.replica)
            self._note(self._done)
            self._opening = False
        if self.guard.skips:
            self.replica.keep_step()

    def step_made(self, steps: int) -> None:
        """Before and after the callbacks of its end."""
        self._note(min(steps, self._length))
        self.resumable = True

    def step_ends(self, steps: int, logs: Any) -> bool:
        replica, steps = self.replica, min(steps, self._length)  # Keras rounds up to whole executions
        own, everybody = self._rows_of(self._done, steps)
        replica.step += steps - self._done
        self._look_at_loss(steps, logs, own=own)
        self.sync.stepped(replica, own)
        self._done = steps
        self.worker.tick()
        self.progress.step(steps, everybody, lambda: _running(logs))
        if self.step_log.active:
            # Keras reports the mean over the epoch so far; derive the step's own loss from it.
            mean, before = float(logs["loss"]) if "loss" in logs else 0.0, replica.epoch_rows
            loss = (mean * (before + own) - self._mean * before) / own if own else 0.0
            self._mean = mean
            self.step_log.step(replica.step, loss=loss, rows=own, lr=replica.learning_rate())
        replica.epoch_rows += own
        ends = self.ends_within_epoch()
        if steps < self._length and not ends:
            ends = not self.goes_on(replica.epoch, done=steps)
            self.after_step(steps, asked=self.halted)
        self._idle_since = time.perf_counter()
        return ends

    def has_read(self, number: int, began: float) -> None:
        """Count the time that the next step has waited for its batch; TensorFlow reads others in advance."""
        if number == self._base + self._done:
            self.progress.took_data(time.perf_counter() - max(began, self._idle_since))

    def _look_at_loss(self, steps: int, logs: Any, *, own: int) -> None:
        """Apply `nan_loss`; the loss that Keras reports is the mean of the epoch so far."""
        names = _names_of_losses(logs) if own else []  # without rows it is that of made-up ones
        replica, guard = self.replica, self.guard
        epoch_steps, number = self._epoch_steps, self._base + steps - 1

        def described() -> tuple[list[int | str], str]:
            return epoch_steps.rows_of(number), ""

        if not guard.skips and self._runs_ahead:
            for name in names:
                guard.note(replica.step, logs.later(name), described, logs.floats)
            return
        # At once: other workers would see NaN in the next step, and could be first.
        sound = all(guard.saw(replica.step, float(logs.later(name)), described) for name in names)
        if not guard.skips:
            return
        sound = replica.step_is_finite() and sound  # which waits for the step to end
        if self.worker.size > 1:
            [bad] = self.sync.collective.sum([np.array([not sound], np.int64)])
            sound = not bad[0]
        if not sound:
            replica.undo_step()
            guard.skip()

    def epoch_ends(self, epoch: int, logs: dict[str, Any], hooks: Any) -> None:
        """Before the user's callbacks: metrics of all ranks, validation included."""
        replica, worker = self.replica, self.worker
        self._epoch_is_over = True
        self.catch_up()
        if worker.size > 1:
            merged = _merged(worker, replica)
            logs.update(_agreed(worker, {name: v for name, v in logs.items() if name not in merged}))
            logs.update({name: value for name, value in merged.items() if name in logs})
        if self.validation is not None and self.options.validates(epoch + 1) and not self.halted:
            with self.stopwatch.timing("validation"):
                evaluated = evaluate(worker, self.task, replica, self.validation, hooks)
            logs.update({f"val_{name}": value for name, value in evaluated.items()})
        self.resumable = False  # what is undone from here on would be done twice

    def epoch_over(self, epoch: int, logs: dict[str, Any], asked_to_stop: bool) -> bool:
        worker = self.worker
        if not self.sync.in_step and worker.size > 1:  # each made its own steps
            rows = worker.total([self.replica.epoch_rows])[0]
        else:
            rows = self.train.rows_of_all(self._base, self._base + self._done)
        self._asked_to_stop = asked_to_stop
        return self._agree_on_end(self.row(epoch + 1, rows, logs))

    def _agree_on_end(self, row: dict[str, Any]) -> bool:
        """End an epoch that the callbacks have seen; returns whether it is the last."""
        worker, asked = self.worker, self._asked_to_stop
        if self.options.callbacks and worker.size > 1:
            self._row, self.resumable = row, True
            asked = worker.total([int(asked)]) != [0]
            self._row, self.resumable = None, False
        self._asked_to_stop = False
        self.end_epoch(row, stopped="a callback requested it" if asked else None)
        return self.is_over or not self.goes_on(row["epoch"] + 1, begins=True)

    def _rows_of(self, first: int, last: int) -> tuple[int, int]:
        return self.train.rows_of(self._base + first, self._base + last)


def _names_of_losses(logs: Mapping[str, Any]) -> list[str]:
    """A user's own train step may have other losses than "loss"."""
    if "loss" in logs:
        return ["loss"]
    return [name for name in logs if name.lower().endswith("loss")] or list(logs)


def _running(logs: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    metrics = dict(logs)
    loss = metrics.pop("loss", float("nan"))
    return loss, {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def _agreed(worker: Group, logs: dict[str, Any]) -> dict[str, Any]:
    """Average over ranks what a user's own train step returns besides metrics."""

    def means(encoded: Sequence[bytes]) -> dict[str, Any]:
        parts = [json.loads(part) for part in encoded]
        return {
            name: sum(part[name] for part in parts) / len(parts)
            for name, value in parts[0].items()
            if isinstance(value, int | float) and all(name in part for part in parts)
        }

    return worker.merged_by_first(json.dumps(logs).encode(), means)


def _merged(worker: Group, replica: KerasReplica) -> dict[str, float]:
    """Metrics over all ranks; their variables hold the merged state afterwards."""
    tallies = replica.tallies
    if worker.outlives:  # the first one may die: everybody merges what came
        return tallies.load(tallies.joined([part for part in worker.all_gather(tallies.take()) if part]))
    states = worker.to_first(tallies.take())
    return tallies.load(worker.from_first(tallies.joined(states) if worker.rank == 0 else b""))
