"""The loop whose steps Kindler makes: every rank makes as many as the others, and ends epochs with them.

It knows neither the framework nor the sync; see `frameworks/base.py` and `sync/contract.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from kindler.data.batches import Batch, Rows
from kindler.frameworks.base import BaseReplica
from kindler.group import Group
from kindler.train.callbacks import Callback, Run
from kindler.train.checkpoints import restore_callbacks
from kindler.train.loop import Loop, Place, ProgressReporter
from kindler.train.options import Task


class StepLoop(Loop):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        worker, self._hooks = self.worker, self.options.callbacks
        self._view = Run(
            rank=worker.rank,
            size=worker.size,
            replica=self.replica,
            steps=self.expected_steps,
            framework=self.task.framework,
        )
        self._view.epoch, self._view.step = self.start.epoch, self.start.step
        # One worker may ask for a checkpoint where others do not; who has no step hooks cannot ask. They
        # agree where they exchange gradients: the driver is not in the way of a step.
        self._hooks_of_steps = any(
            getattr(type(hook), name) is not getattr(Callback, name)
            for hook in self._hooks
            for name in ("on_step_begin", "on_step_end")
        )
        several = worker.size > 1 and self.sync.in_step
        self._agree_each_step = self.writes_checkpoints and several and self._hooks_of_steps
        self._rows = 0  # of this rank in the current step
        self.replica.before_exchange = lambda: self._note(1)
        self.replica.watch_losses(self.guard)

    def run(self) -> None:
        start = self.start
        self._gather_for_hooks()
        if start.point is None or start.takes_over:
            self._each("on_run_begin")
            restore_callbacks(self._hooks, start.callbacks)
        epoch = start.epoch if start.within_epoch else start.epoch + 1
        if start.point is not None and start.point.row is not None:
            if start.takes_over:
                self.replica.load_state(start.point.state)
                self._first_step = start.step - start.step_in_epoch
            self.start = replace(start, point=None)
            self._close(dict(start.point.row))
            epoch += 1
        while not self.is_over and epoch <= self.last_epoch and self._enters(epoch):
            self._view.epoch = epoch
            self._epoch(epoch)
            epoch += 1
        self._each("on_run_end")

    def _enters(self, epoch: int) -> bool:
        """Whether to go on with an epoch; once it has begun, that is decided before its next step."""
        has_begun = self.start.within_epoch and epoch == self.start.epoch
        return has_begun or self.goes_on(epoch, begins=True)

    def _epoch(self, epoch: int) -> None:
        replica, sync = self.replica, self.sync
        point = self.start.point
        done = self.begin_epoch(epoch)
        if point is None or point.state:
            self._each("on_epoch_begin")
            if point is not None and self._hooks:  # what they did to the model is in the state of the others
                self._go_to(point)
        self.start = replace(self.start, point=None)
        sync.begin_epoch(replica)
        self._note(0)
        stretch = self.train.stretch(epoch, done=done, steps=self.options.steps_per_epoch)
        with closing(stretch) as batches:
            while (
                not self._epoch_is_over
                and self.goes_on(epoch, done=done)
                and (batch := self._next(batches)) is not None
            ):
                done += 1
                self._step(batch, done)
                if done == self.steps or batch.ends or self.ends_within_epoch():
                    break
                self.after_step(done, asked=sync.in_step and self._asked_for_checkpoint())
                if self._hooks:  # they may do with the weights what they like
                    replica.wait_for_copy()
        self._epoch_is_over = True
        if self.halted and done:
            self.after_step(done, asked=True)
        self.catch_up()
        logs = _merged(self.worker, replica, part="train" if self.step_log.active else None)
        row = self.row(epoch, int(logs.pop("num_samples")), logs)
        if self.halted:
            self.end_epoch(row, stopped=None)
            return
        if self.validation is not None and self.options.validates(epoch):
            with self.stopwatch.timing("validation"):
                self._each("on_validation_begin")
                logs = _evaluated(self.worker, replica, self.validation, report=self.step_log.active)
                named = {f"val_{name}": value for name, value in logs.items()}
                self._each("on_validation_end", named)
            row |= named
        self.resumable = False  # from here on, what is undone would be done twice
        replica.end_epoch(row)
        self._gather_for_hooks()
        self._each("on_epoch_end", row)
        self._close(row)

    def _close(self, row: dict[str, Any]) -> None:
        """End an epoch that the callbacks have seen."""
        self._row, self.resumable = row, True
        asked = self._agree()
        self._row, self.resumable = None, False
        self.end_epoch(row, stopped=self._view.stopping, asked=asked)

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        began = time.perf_counter()
        batch = next(batches, None)
        self.progress.took_data(time.perf_counter() - began)
        return batch

    def _step(self, batch: Batch, number: int) -> None:
        replica = self.replica
        self._each("on_step_begin")
        self._rows = batch.rows
        if self.step_log.active:
            rate, (loss, weight) = replica.learning_rate(), replica.loss_sums()
            self.sync.step(replica, batch)
            loss_now, weight_now = replica.loss_sums()
            mean = (loss_now - loss) / (weight_now - weight) if weight_now > weight else 0.0
            self.step_log.step(replica.step, loss=mean, rows=weight_now - weight, lr=rate)
        else:
            self.sync.step(replica, batch)
        self.worker.tick()
        self._view.step = replica.step
        self._each("on_step_end")
        if self._hooks_of_steps:  # they may draw random numbers
            self._note(0)
        self.progress.step(number, batch.global_rows, partial(_running, replica))

    def _note(self, steps: int) -> None:
        """Keep this rank's own state as that of the end of the last step, or of the current one (1)."""
        if self.note is not None:
            epoch, done, step = self.place
            rows = self.replica.epoch_rows + (self._rows if steps else 0)
            self.note(Place(epoch, done + steps, step + steps), rows, steps > 0)

    def _gather_for_hooks(self) -> None:
        """A callback may write a checkpoint by itself, on the first worker only."""
        if self._hooks:
            self.sync.whole(self.replica)

    def _agree(self) -> bool:
        """All workers stop, or save, when a callback of one asks for it."""
        if not self._hooks:
            return False
        mine = {"stop": self._view.stopping, "save": self._view.take_save_request()}
        parts = [json.loads(part) for part in self.worker.all_gather(json.dumps(mine).encode()) if part]
        if reason := next(filter(None, (part["stop"] for part in parts)), None):
            self._view.stop(reason)
        return any(part["save"] for part in parts)

    def _asked_for_checkpoint(self) -> bool:
        if not self._agree_each_step:
            return self._view.take_save_request()
        [asked] = self.sync.collective.sum([np.array([self._view.take_save_request()], np.int64)])
        return bool(asked[0])

    def _each(self, name: str, *args: Any) -> None:
        for hook in self._hooks:
            getattr(hook, name)(self._view, *args)


def evaluate(worker: Group, task: Task, replica: BaseReplica, data: Rows) -> dict[str, Any]:
    return _evaluated(worker, replica, data, show=task.show, report=task.log_steps)


def _evaluated(
    worker: Group, replica: BaseReplica, data: Rows, *, show: bool = False, report: bool
) -> dict[str, Any]:
    progress = ProgressReporter(worker, show=show)
    progress.begin(epoch=1, epochs=1, steps=data.expected, quiet=True)
    with closing(data.stretch(0)) as batches:
        for step, batch in enumerate(batches, start=1):
            replica.eval_step(batch)
            worker.tick()
            progress.step(step, batch.global_rows, partial(_running, replica))
    return _merged(worker, replica, part="validation" if report else None)


def _running(replica: BaseReplica) -> tuple[float, Mapping[str, float]]:
    return replica.running_loss(), replica.running_metrics()


def _merged(worker: Group, replica: BaseReplica, *, part: str | None) -> dict[str, Any]:
    """Metrics over all workers; with `part`, the driver also gets those of each."""
    tallies = replica.take_tallies()
    if part is not None:
        own = replica.merge_tallies([tallies])
        worker.report("worker", rank=worker.rank, part=part, epoch=replica.epoch, figures=own)
    return worker.merged_by_first(tallies, replica.merge_tallies)
