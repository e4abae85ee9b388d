"""The start of a run on a worker: its replica, and what training continues from.

Whether a checkpoint from the middle of an epoch can be used is known only when all workers have opened their
data. The driver therefore sends candidates, and every worker makes the same choice.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kindler.data.batches import Rows
from kindler.engine.placement import Placement, set_current_worker
from kindler.engine.placement import worker as this_worker
from kindler.errors import ConfigError
from kindler.frameworks.registry import FRAMEWORKS
from kindler.group import Group
from kindler.train.checkpoints import CheckpointWarning, Header, parse
from kindler.train.options import Task
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
        seed=task.config.seed,
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


@dataclass(frozen=True, kw_only=True)
class Start(Header):
    """Where a run stands before its first step, as a checkpoint's header; the replica has loaded its state.

    If `step_in_epoch` is 0, the next epoch is `epoch + 1`; otherwise `epoch` continues, and `local_states`,
    those of all earlier ranks, are to be loaded after `begin_epoch(epoch)`. The last epoch of the run is
    `first_epoch` plus `FitOptions.epochs_to_train`.
    """

    framework: str = ""
    local_states: tuple[bytes, ...] = ()


def begin(
    replica: Any,
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
    candidates = [parse(data, verify=False) for data in states[1:]]  # the driver has verified them
    chosen = next((c for c in candidates if usable(c.header, task, counts, marks)), None)
    if candidates and chosen is not candidates[0] and rank == 0:
        where = f"the end of epoch {chosen.header.epoch}" if chosen else "the beginning"
        warnings.warn(
            "the newest checkpoint is from the middle of an epoch, and the rows or their order have changed;"
            f" continuing from {where}, so that every row is used once per epoch.",
            CheckpointWarning,
            stacklevel=2,
        )
    if chosen is None:
        if states[0]:
            replica.load_state(states[0])
        if task.limit is not None and rank == 0:
            task.limit.check(replica.expected_bytes())
        if task.trains and task.training.initial_epoch is not None:
            replica.epoch = task.training.initial_epoch
        return Start(
            epoch=replica.epoch, step=replica.step, first_epoch=replica.epoch, first_step=replica.step
        )
    replica.load_state(chosen.state)
    return Start(**vars(chosen.header), local_states=() if chosen.header.ends_epoch else chosen.local_states)


def taken_over(worker: Group, replica: Any, task: Task, start: Start, data: Rows) -> Start:
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


def load_local_states(replica: Any, states: Sequence[bytes], worker: Group) -> None:
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
        and (header.seed, header.shuffle) == (task.config.seed, options.shuffle)
    )
