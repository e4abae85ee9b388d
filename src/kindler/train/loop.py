"""The run on one worker: every rank calls `run`, makes as many steps as the others and ends epochs with them.

It knows neither the framework nor the sync; see `frameworks/contract.py` and `sync/contract.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
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
from kindler.train.checkpoints import restore_callbacks
from kindler.train.joining import joined
from kindler.train.ledger import EpochLedger, ProgressReporter
from kindler.train.options import Task
from kindler.train.rows import open_batch_stream
from kindler.train.run_start import (
    Start,
    begin,
    build_replica,
    last_step,
    taken_over,
)


def run(worker: Group, task_bytes: bytes, spec: bytes, *states: bytes) -> Sequence[bytes]:
    """Train or evaluate; rank 0 returns the history (or metrics) as JSON, and the model's state.

    `states` is the model's state (empty for a new one), then checkpoints to continue from, best first.
    """
    task: Task = cloudpickle.loads(task_bytes)
    placed = worker.place(task.config.device, share=task.config.share_gpus)
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
                rows, state = [_evaluated(worker, replica, data, show=task.show, tell=tell)], b""
        if not worker.leads:
            return [b"", b""]
        report = {"rows": rows, "layout": data.layout, "mode": replica.mode, "step": replica.step}
        return [json.dumps(report).encode(), state]


def _process_group(worker: Group, task: Task, placed: Placement) -> AbstractContextManager[None]:
    if not task.process_group:
        return nullcontext()
    from kindler.frameworks.torch.exchange_network import process_group

    return process_group(worker, shared_gpus=placed.shared, timeout_s=task.config.settings.sync_timeout_s)


def _weigh(replica: BaseReplica, task: Task) -> None:
    if not task.trains:
        return
    classes, column = task.training.class_weight, task.training.columns.weight_col is not None
    if classes or column:
        replica.weigh_rows(classes, column=column)


class _Fit:
    def __init__(
        self, worker: Group, task: Task, replica: BaseReplica, train: Rows, start: Start, sync: Sync
    ) -> None:
        self._worker, self._replica, self._train, self._sync = worker, replica, train, sync
        self._validation = (
            open_batch_stream(worker, task, task.validation, "validation_data", trains=False)
            if task.validation
            else None
        )
        if self._validation is not None:
            self._validation.held_by(replica.hold)
        start = self._start = taken_over(worker, replica, task, start, train)
        options = self._options = task.training
        self._hooks: Sequence[Callback] = options.callbacks
        self._view = Run(
            rank=worker.rank,
            size=worker.size,
            replica=replica,
            steps=options.steps_per_epoch or train.expected,
            framework=task.framework,
        )
        self._view.epoch, self._view.step = start.epoch, start.step
        ledger = EpochLedger(
            worker, task, replica, sync, train, start, callbacks=options.callbacks, on_nan=options.on_nan
        )
        self._ledger = ledger
        # One worker may ask for a checkpoint where others do not; who has no step hooks cannot ask. They
        # agree where they exchange gradients: the driver is not in the way of a step.
        several = worker.size > 1 and sync.in_step
        self._agree_each_step = ledger.checkpoints.active and several and _look_at_steps(self._hooks)
        replica.watch_losses(ledger.guard)

    def run(self) -> list[dict[str, Any]]:
        ledger, start = self._ledger, self._start
        validation = closing(self._validation) if self._validation is not None else nullcontext()
        with ledger.checkpoints, validation:
            self._gather_for_hooks()
            self._each("on_run_begin")
            restore_callbacks(self._hooks, start.callbacks)
            epoch = start.epoch if start.step_in_epoch else start.epoch + 1
            while not ledger.is_over and epoch <= ledger.last_epoch and ledger.goes_on(epoch):
                self._view.epoch = epoch
                self._epoch(epoch)
                epoch += 1
            self._each("on_run_end")
        return ledger.rows

    def _epoch(self, epoch: int) -> None:
        replica, ledger = self._replica, self._ledger
        done = ledger.begin_epoch(epoch)
        self._each("on_epoch_begin")
        self._sync.begin_epoch(replica)
        stretch = self._train.stretch(epoch, done=done, steps=self._options.steps_per_epoch)
        with closing(stretch) as batches:
            while ledger.goes_on(epoch) and (batch := self._next(batches)) is not None:
                done += 1
                self._step(batch, done)
                if done == ledger.steps or batch.ends or ledger.ends_within_epoch():
                    break
                ledger.after_step(done, asked=self._sync.in_step and self._asked_for_checkpoint())
                if self._hooks:  # they may do with the weights what they like
                    replica.wait_for_copy()
        if ledger.halted and done:
            ledger.after_step(done, asked=True)
        ledger.catch_up()
        logs = _merged(self._worker, replica, tell="train" if ledger.step_log.active else None)
        row = ledger.row(epoch, int(logs.pop("num_samples")), logs)
        if ledger.halted:
            ledger.end_epoch(row, stopped=None)
            return
        if self._validation is not None and self._options.validates(epoch):
            row |= self._validated(self._validation)
        replica.end_epoch(row)
        self._gather_for_hooks()
        self._each("on_epoch_end", row)
        asked = self._agree()
        ledger.end_epoch(row, stopped=self._view.stopping, asked=asked)

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        began = time.perf_counter()
        batch = next(batches, None)
        self._ledger.progress.took_data(time.perf_counter() - began)
        return batch

    def _step(self, batch: Batch, number: int) -> None:
        replica, log = self._replica, self._ledger.step_log
        self._each("on_step_begin")
        if log.active:
            rate, (loss, weight) = replica.learning_rate(), replica.loss_sums()
            self._sync.step(replica, batch)
            loss_now, weight_now = replica.loss_sums()
            mean = (loss_now - loss) / (weight_now - weight) if weight_now > weight else 0.0
            log.step(replica.step, loss=mean, rows=weight_now - weight, lr=rate)
        else:
            self._sync.step(replica, batch)
        self._worker.tick()
        self._view.step = replica.step
        self._each("on_step_end")
        self._ledger.progress.step(number, batch.global_rows, partial(_running, replica))

    def _validated(self, validation: Rows) -> dict[str, Any]:
        self._each("on_validation_begin")
        tell = "validation" if self._ledger.step_log.active else None
        logs = _evaluated(self._worker, self._replica, validation, tell=tell)
        named = {f"val_{name}": value for name, value in logs.items()}
        self._each("on_validation_end", named)
        return named

    def _gather_for_hooks(self) -> None:
        """A callback may write a checkpoint by itself, on the first worker only."""
        if self._hooks:
            self._sync.whole(self._replica)

    def _agree(self) -> bool:
        """All workers stop, or save, when a callback of one asks for it."""
        if not self._hooks:
            return False
        mine = {"stop": self._view.stopping, "save": self._view.take_save_request()}
        parts = [json.loads(part) for part in self._worker.all_gather(json.dumps(mine).encode()) if part]
        if reason := next(filter(None, (part["stop"] for part in parts)), None):
            self._view.stop(reason)
        return any(part["save"] for part in parts)

    def _asked_for_checkpoint(self) -> bool:
        if not self._agree_each_step:
            return self._view.take_save_request()
        [asked] = self._sync.collective.sum([np.array([self._view.take_save_request()], np.int64)])
        return bool(asked[0])

    def _each(self, name: str, *args: Any) -> None:
        for hook in self._hooks:
            getattr(hook, name)(self._view, *args)


def _running(replica: BaseReplica) -> tuple[float, Mapping[str, float]]:
    return replica.running_loss(), replica.running_metrics()


def _evaluated(
    worker: Group, replica: BaseReplica, data: Rows, *, show: bool = False, tell: str | None = None
) -> dict[str, Any]:
    progress = ProgressReporter(worker, show=show)
    progress.begin(epoch=1, epochs=1, steps=data.expected, quiet=True)
    with closing(data.stretch(0)) as batches:
        for step, batch in enumerate(batches, start=1):
            replica.eval_step(batch)
            worker.tick()
            progress.step(step, batch.global_rows, partial(_running, replica))
    return _merged(worker, replica, tell=tell)


def _merged(worker: Group, replica: BaseReplica, *, tell: str | None = None) -> dict[str, Any]:
    """Metrics over all workers; with `tell`, the driver also gets those of each."""
    tallies = replica.take_tallies()
    if tell is not None:
        own = replica.merge_tallies([tallies])
        worker.report("worker", rank=worker.rank, part=tell, epoch=replica.epoch, figures=own)
    return worker.merged_by_first(tallies, replica.merge_tallies)


def _look_at_steps(hooks: Sequence[Callback]) -> bool:
    names = ("on_step_begin", "on_step_end")
    return any(getattr(type(hook), name) is not getattr(Callback, name) for hook in hooks for name in names)
