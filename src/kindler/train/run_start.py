"""The start of a run on a worker: opening its data, and deciding what training continues from.

Whether a checkpoint from the middle of an epoch can be used is known only when all workers have opened their
data. The driver therefore sends candidates, and every worker makes the same choice.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kindler.data.batches import Batches, BatchOptions, Rows
from kindler.data.row_order import Dealing, joined_counts
from kindler.data.sources import Source
from kindler.data.spool import Spool, agreed
from kindler.engine.placement import Placement, half_of_memory, set_current_worker
from kindler.engine.placement import worker as this_worker
from kindler.errors import ConfigError, DataError
from kindler.frameworks.registry import FRAMEWORKS
from kindler.group import Group
from kindler.train.checkpoint_file import Checkpoint, CheckpointWarning, Header, parse
from kindler.train.loader_source import Reader, StreamSource
from kindler.train.loader_steps import AgreedSteps, NumberedSteps
from kindler.train.prepared import preparation_for, prepared_batches
from kindler.train.task import Task
from kindler.train.triggers import Progress, end_of_epoch


def build_replica(worker: Group, task: Task, placed: Placement, spec: bytes, **options: Any) -> Any:
    """The replica of this worker, on its device.

    Args:
        worker: The worker.
        task: The run.
        placed: Where the worker computes.
        spec: The packed model.
        options: What else the replica is made with.

    Raises:
        ConfigError: Several workers would use one GPU, and nobody said that they may.
    """
    replica = FRAMEWORKS.load(task.framework).from_bytes(
        spec,
        device=placed.device,
        rank=worker.rank,
        local_rank=placed.index,
        seed=task.seed,
        threads=worker.threads,
        **options,
    )
    if placed.visible is not None and not getattr(replica, "on_gpu", False):
        set_current_worker(replace(this_worker(), device="cpu"))
    elif placed.problem is not None:
        raise ConfigError(placed.problem)
    if hasattr(replica, "set_up"):  # a module of Lightning wants to know what for
        replica.set_up("fit" if task.trains else "validate")
    return replica


class Loads(Protocol):
    """What `begin` needs of a replica."""

    epoch: int
    step: int

    def load_state(self, data: bytes) -> None: ...
    def expected_bytes(self) -> int: ...


class LoadsLocal(Protocol):
    """What a replica needs to continue in the middle of an epoch."""

    def load_local_state(self, data: bytes) -> None: ...
    def join_local_states(self, states: Sequence[bytes], *, size: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run stands before its first step; the replica has loaded the state already.

    Attributes:
        epoch: Epochs started since the model was new. If `step_in_epoch` is 0, the next one is `epoch + 1`;
            otherwise this one continues.
        step: Optimizer steps since the model was new.
        step_in_epoch: Steps done of the epoch that continues; 0 starts a new one.
        local_states: The states of all earlier ranks, to be loaded after `begin_epoch(epoch)`; empty between
            epochs.
        first_epoch: Epochs that were complete when the run started; its last one is that plus
            `FitOptions.epochs_to_train`.
        first_step: Steps that were done by then.
        seconds: Time that the epoch to be continued has taken so far.
        rows: The run's rows of the history so far.
        stopped: Why the run has ended already, if it has.
        callbacks: The class name and the state of each callback.
    """

    epoch: int
    step: int
    step_in_epoch: int = 0
    local_states: tuple[bytes, ...] = ()
    first_epoch: int = 0
    first_step: int = 0
    seconds: float = 0.0
    rows: tuple[Mapping[str, Any], ...] = ()
    stopped: str | None = None
    callbacks: tuple[Mapping[str, Any], ...] = field(default=())


def open_batch_stream(
    worker: Group, task: Task, source: Source | StreamSource, what: str, *, trains: bool
) -> Rows:
    """This worker's part of the data, for a loop that takes batches as they come; all workers call it."""
    if not isinstance(source, StreamSource):
        return open_batches(worker, task, source, what, trains=trains)
    bounded = trains and task.training.steps_per_epoch is not None
    reader = _reader(worker, task, source, what, trains)
    return AgreedSteps(worker, reader, what=what, bounded=bounded, number=1 if trains else 0)


def open_indexed_batches(
    worker: Group, task: Task, source: Source | StreamSource, what: str, *, trains: bool
) -> Rows:
    """The same for a loop that asks for batches by number."""
    if not isinstance(source, StreamSource):
        return open_batches(worker, task, source, what, trains=trains)
    bounded = task.training.steps_per_epoch if trains else None
    reader = _reader(worker, task, source, what, trains)
    return NumberedSteps(worker, reader, what=what, trains=trains, bounded=bounded)


def _reader(worker: Group, task: Task, source: StreamSource, what: str, trains: bool) -> Reader:
    return Reader(
        worker, source, batch_size=task.options.batch_size, seed=task.seed, what=what, trains=trains
    )


def open_batches(worker: Group, task: Task, source: Source, what: str, *, trains: bool) -> Batches:
    """This worker's part of a source, cut into as many steps as on every other; all workers call it."""
    dealing = task.dealing or Dealing.between(worker.size, seed=task.seed)
    shuffle = trains and task.training.shuffle
    preparation = preparation_for(task, source)
    numbered = (trains and not shuffle) or preparation is not None
    spool = source.open(worker, dealing, in_order=numbered)
    own_lanes = spool.lane_counts(dealing.known_lanes)[worker.rank :: worker.size]
    parts = _gathered(worker, {"rows": spool.rows, "lanes": own_lanes})
    # In a message of their own: they are the same on most workers, and equal bytes travel once.
    layouts = dict.fromkeys(worker.all_gather(json.dumps(spool.layout()).encode()))
    rows = sum(part["rows"] for part in parts)
    if not rows:
        raise DataError(f"{what} has no rows.")
    spool = spool.with_layout(agreed([json.loads(layout) for layout in layouts]))
    if any(part["lanes"] for part in parts):
        by_rank = [part["lanes"] for part in parts]
        counts = joined_counts(by_rank, dealing.known_lanes, dealing.lanes_for(rows))
        spool = spool.with_lanes(len(counts))
    else:
        counts = [part["rows"] for part in parts]
    # A checkpoint from the middle of an epoch can be used with the same rows only.
    marked = task.model_dir is not None and trains
    options = BatchOptions(
        counts=counts,
        rank=worker.rank,
        size=worker.size,
        batch_size=task.options.batch_size,
        seed=task.seed,
        shuffle=shuffle,
        marks=_marks(worker, spool, len(counts)) if marked else (),
        weighted=task.options.columns.weight_col is not None,
        memory_bytes=2 * half_of_memory(),
    )
    if preparation is None:
        return Batches(spool, source.columns, options)
    stack = bool(task.options.columns.stack_features)
    return prepared_batches(worker, spool, source.columns, preparation, options, trains=trains, stack=stack)


def _gathered(worker: Group, mine: Any) -> list[Any]:
    return [json.loads(part) for part in worker.all_gather(json.dumps(mine).encode())]


def _marks(worker: Group, spool: Spool, lanes: int) -> list[str]:
    """A fingerprint of the rows of each lane."""
    own = {lane: spool.fingerprint(rows, parts=lanes) for lane, rows in spool.by_lane(worker.rank).items()}
    marks = {int(lane): mark for part in _gathered(worker, own) for lane, mark in part.items()}
    return [marks.get(lane, "") for lane in range(lanes)]


def begin(
    replica: Loads,
    task: Task,
    states: Sequence[bytes],
    *,
    rank: int,
    counts: Sequence[int],
    marks: Sequence[str] = (),
) -> Start:
    """Load into the replica what the run continues from, and return where that is.

    Args:
        replica: The replica, before it is attached to others.
        task: The run.
        states: The model's state (empty for a new one), then the files of checkpoints, best first.
        rank: This worker.
        counts: Rows of every lane.
        marks: A fingerprint of those rows (`Batches.marks`).
    """
    candidates = [_parsed(data) for data in states[1:]]
    found = next((c for c in candidates if usable(c.header, task, counts, marks)), None)
    if candidates and found is not candidates[0] and rank == 0:
        where = f"the end of epoch {found.header.epoch}" if found else "the beginning"
        warnings.warn(
            "the newest checkpoint is from the middle of an epoch, and the rows or their order have changed;"
            f" continuing from {where}, so that every row is used once per epoch.",
            CheckpointWarning,
            stacklevel=2,
        )
    if found is None:
        if states[0]:
            replica.load_state(states[0])
        if task.limit is not None and rank == 0:
            task.limit.check(replica.expected_bytes())
        if task.trains and task.training.initial_epoch is not None:
            replica.epoch = task.training.initial_epoch
        return Start(
            epoch=replica.epoch, step=replica.step, first_epoch=replica.epoch, first_step=replica.step
        )
    header = found.header
    replica.load_state(found.state)
    return Start(
        epoch=header.epoch,
        step=header.step,
        step_in_epoch=header.step_in_epoch,
        local_states=() if header.ends_epoch else found.local_states,
        first_epoch=header.first_epoch,
        first_step=header.first_step,
        seconds=header.seconds,
        rows=header.rows,
        stopped=header.stopped,
        callbacks=header.callbacks,
    )


def taken_over(worker: Group, replica: Loads, task: Task, start: Start, data: Rows) -> Start:
    """Where this process goes on: at `start`, or where one had come to whose place it takes.

    All workers call it after they have joined each other and opened their data, and before the first epoch.
    """
    kept = worker.opened() if worker.replaceable else b""
    if not kept:
        return start
    return begin(replica, task, [b"", kept], rank=worker.rank, counts=data.counts, marks=data.marks)


def last_step(task: Task, start: Start) -> int | None:
    """The optimizer step after which the run ends; None where steps do not end it."""
    most = task.training.max_steps
    return None if most is None else start.first_step + most


def over_already(task: Task, start: Start) -> bool:
    """Whether the run has nothing left to do before its first step: its steps are made, its trigger fires."""
    most, trigger = last_step(task, start), task.training.end_trigger
    if most is not None and start.step >= most:
        return True
    if trigger is None or not start.step:
        return False
    if start.step_in_epoch:
        return trigger(Progress(epoch=start.epoch, step=start.step))
    if start.rows:
        return trigger(end_of_epoch(start.epoch, start.step, start.rows[-1]))
    # A model that was trained before: as if its next epoch had just begun.
    return trigger(Progress(epoch=start.epoch + 1, step=start.step))


def load_local_states(replica: LoadsLocal, states: Sequence[bytes], worker: Group) -> None:
    """Let a replica continue in the middle of an epoch, from the states of the ranks there were."""
    if len(states) == worker.size:
        replica.load_local_state(states[worker.rank])
    else:
        replica.join_local_states(states, size=worker.size)


def usable(header: Header, task: Task, counts: Sequence[int], marks: Sequence[str] = ()) -> bool:
    """Whether training can continue from there without missing a row or using one twice.

    Between epochs it always can. Within an epoch, every lane must have the rows it had, in the same order,
    whichever worker has the lane; for rows that were not counted that is unknown.
    """
    options = task.training
    return header.ends_epoch or (
        len(counts) > 0
        and (header.counts, header.marks) == (tuple(counts), tuple(marks))
        and header.batch_size == options.batch_size
        and header.steps_per_epoch == options.steps_per_epoch
        and (header.seed, header.shuffle) == (task.seed, options.shuffle)
    )


def _parsed(data: bytes) -> Checkpoint:
    return parse(data, verify=False)  # the driver has
