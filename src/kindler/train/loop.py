"""The run on one worker: every rank calls `run` and does the same steps at the same time.

Which framework steps the model and how gradients are exchanged is not known here; see
`frameworks/replica.py` and `sync/`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import cloudpickle

from kindler.data.batches import Batches
from kindler.data.sources import Source
from kindler.data.spool import agreed
from kindler.errors import DataError
from kindler.frameworks.registry import FRAMEWORKS
from kindler.frameworks.replica import Replica
from kindler.train.callbacks import Callback, Run
from kindler.train.checkpoint import write_file
from kindler.train.syncs import SYNCS
from kindler.train.task import Task

__all__ = ["run"]

_REPORT_EVERY_S = 0.1
_CHECKPOINT = "checkpoint-{epoch:05d}.pt"


class Worker(Protocol):
    """What the loop needs of the engine's worker."""

    rank: int
    size: int
    local_rank: int
    threads: int
    scratch: Path

    def all_gather(self, data: bytes) -> list[bytes]: ...
    def barrier(self) -> None: ...
    def report(self, kind: str, **fields: Any) -> None: ...


def run(worker: Worker, task_bytes: bytes, spec: bytes, state: bytes) -> Sequence[bytes]:
    """Train or evaluate; rank 0 returns the history (or figures) as JSON, and the model's state."""
    task: Task = cloudpickle.loads(task_bytes)
    replica_type = FRAMEWORKS.load(task.framework)
    replica: Replica = replica_type.from_bytes(
        spec,
        device=task.device,
        rank=worker.rank,
        local_rank=worker.local_rank,
        seed=task.seed,
        threads=worker.threads,
        feature_names=tuple(column.name for column in task.data.columns.features),
    )
    if state:
        replica.load_state(state)
    data = _batches(worker, task, task.data, "data", shuffle=task.shuffle and task.epochs > 0)
    with _attached(worker, task, replica):
        rows = (
            _fit(worker, task, replica, data)
            if task.epochs
            else [_pass(worker, replica, data, show=task.show)]
        )
    if worker.rank != 0:
        return [b"", b""]
    told = json.dumps({"rows": rows, "layout": data.layout}).encode()
    return [told, replica.state() if task.epochs else b""]


@contextmanager
def _attached(worker: Worker, task: Task, replica: Replica) -> Iterator[None]:
    """Join the replicas of all workers while the block runs; evaluation needs no joining."""
    if not task.epochs or worker.size == 1:
        yield
        return
    group_type = SYNCS.load(f"allreduce/{task.framework}")
    settings = task.settings
    group = group_type(
        worker,
        device=replica.device,
        timeout_s=settings.sync_timeout_s,
        shared_memory=settings.shared_memory,
    )
    with closing(group):
        replica.attach(group)
        yield


def _fit(worker: Worker, task: Task, replica: Replica, train: Batches) -> list[dict[str, Any]]:
    validation = (
        _batches(worker, task, task.validation, "validation_data", shuffle=False) if task.validation else None
    )
    shown = task.show and worker.rank == 0
    view = Run(rank=worker.rank, size=worker.size, replica=replica)
    hooks: Sequence[Callback] = task.callbacks
    rows: list[dict[str, Any]] = []
    last = replica.epoch + task.epochs
    end_step = replica.step + (task.max_steps if task.max_steps is not None else train.steps * task.epochs)
    _each(hooks, "on_run_begin", view)
    while replica.epoch < last and replica.step < end_step and view.stopping is None:
        view.epoch = replica.epoch + 1
        _each(hooks, "on_epoch_begin", view)
        row = _epoch(worker, replica, train, view, hooks, last=last, end_step=end_step, shown=shown)
        if validation is not None:
            logs = _pass(worker, replica, validation)
            row |= {f"val_{name}": value for name, value in logs.items()}
        replica.end_epoch(row)
        _each(hooks, "on_epoch_end", view, row)
        _agree_to_stop(worker, view, bool(hooks))
        _save(worker, task, replica)
        rows.append(row)
        if worker.rank == 0:
            worker.report("epoch", row=row)
    _each(hooks, "on_run_end", view)
    return rows


def _epoch(
    worker: Worker,
    replica: Replica,
    train: Batches,
    view: Run,
    hooks: Sequence[Callback],
    *,
    last: int,
    end_step: int,
    shown: bool,
) -> dict[str, Any]:
    """One pass of training; its row of the history."""
    started = reported = time.perf_counter()
    first_step = replica.step
    replica.begin_epoch(view.epoch)
    if shown:
        _progress(worker, replica, view.epoch, last, 0, train.steps)
    with closing(train.epoch(view.epoch)) as batches:
        for batch in batches:
            replica.train_step(batch)
            view.step = replica.step
            _each(hooks, "on_step_end", view)
            now = time.perf_counter()
            if shown and now - reported > _REPORT_EVERY_S:
                reported = now
                _progress(worker, replica, view.epoch, last, replica.step - first_step, train.steps)
            if replica.step >= end_step:
                break
    replica.merge_buffers()
    logs = _merged(worker, replica)
    seconds = time.perf_counter() - started
    rows = logs.pop("num_samples")
    return {
        "epoch": view.epoch,
        "steps": replica.step - first_step,
        "num_samples": int(rows),
        **logs,
        "seconds": seconds,
        "rows_per_s": rows / seconds if seconds else 0.0,
    }


def _pass(worker: Worker, replica: Replica, data: Batches, *, show: bool = False) -> dict[str, Any]:
    """Each row once, without training; the figures over all workers."""
    reported = time.perf_counter()
    with closing(data.epoch(0)) as batches:
        for step, batch in enumerate(batches, start=1):
            replica.eval_step(batch)
            if show and worker.rank == 0 and time.perf_counter() - reported > _REPORT_EVERY_S:
                reported = time.perf_counter()
                _progress(worker, replica, 1, 1, step, data.steps)
    return _merged(worker, replica)


def _merged(worker: Worker, replica: Replica) -> dict[str, Any]:
    return replica.merge_tallies(worker.all_gather(replica.take_tallies()))


def _batches(worker: Worker, task: Task, source: Source, what: str, *, shuffle: bool) -> Batches:
    """This worker's part of a source, cut into as many steps as every other worker's."""
    spool = source.open(worker.rank, worker.size, worker.scratch)
    told = [
        json.loads(part)
        for part in worker.all_gather(json.dumps({"rows": spool.rows, "layout": spool.layout()}).encode())
    ]
    counts = [part["rows"] for part in told]
    if not sum(counts):
        raise DataError(f"{what} has no rows.")
    return Batches(
        spool.with_layout(agreed([part["layout"] for part in told])),
        source.columns,
        counts=counts,
        rank=worker.rank,
        batch_size=task.batch_size,
        seed=task.seed,
        shuffle=shuffle,
    )


def _agree_to_stop(worker: Worker, view: Run, asked: bool) -> None:
    """A callback may decide by what only its own worker knows; all stop when one does."""
    if asked:
        reasons = [part.decode() for part in worker.all_gather((view.stopping or "").encode())]
        if reason := next(filter(None, reasons), None):
            view.stop(reason)


def _save(worker: Worker, task: Task, replica: Replica) -> None:
    if task.model_dir is not None and worker.rank == 0:
        write_file(Path(task.model_dir) / _CHECKPOINT.format(epoch=replica.epoch), replica.state())


def _progress(worker: Worker, replica: Replica, epoch: int, last: int, step: int, steps: int) -> None:
    loss = replica.running_loss() if step else None
    worker.report("progress", epoch=epoch, epochs=last, step=step, steps=steps, loss=loss)


def _each(hooks: Sequence[Callback], name: str, *args: Any) -> None:
    for hook in hooks:
        getattr(hook, name)(*args)
