"""The start of a run on a worker: its replica, and what training continues from.

Whether a mid-epoch checkpoint is usable is known only when all workers have opened their data, so the driver
sends candidates, and every worker makes the same choice.
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
    """Raises ConfigError if several workers would use one GPU without permission."""
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
    """Where a run stands before its first step; the replica has loaded its state.

    If `step_in_epoch` is 0, the next epoch is `epoch + 1`; otherwise `epoch` continues, and `local_states`,
    those of all earlier ranks, are loaded after `begin_epoch(epoch)`.
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
    """Load what the run continues from into the replica, not yet joined to others, and return where that is.

    `states` is the model's state (empty for a new one), then the files of checkpoints, best first.
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
    """Where this process continues: at `start`, or where the process it replaces had come to.

    All workers call it after they have joined and opened their data, and before the first epoch.
    """
    kept = worker.opened() if worker.replaceable else b""
    if not kept:
        return start
    return begin(replica, task, [b"", kept], rank=worker.rank, counts=data.counts, marks=data.marks)


def last_step(task: Task, start: Start) -> int | None:
    """The optimizer step after which the run ends; None if steps do not end it."""
    most = task.training.max_steps
    return None if most is None else start.first_step + most


def over_already(task: Task, start: Start) -> bool:
    """Whether the run has nothing left to do before its first step."""
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
    """Continue in mid-epoch from the states of all earlier ranks, whose number may differ."""
    if len(states) == worker.size:
        replica.load_local_state(states[worker.rank])
    else:
        replica.join_local_states(states, size=worker.size)


def usable(header: Header, task: Task, counts: Sequence[int], marks: Sequence[str] = ()) -> bool:
    """Whether training can continue from there without missing or repeating a row.

    Between epochs it always can. Within one, every lane must have the same rows in the same order, whichever
    worker has the lane; rows that were not counted are never known to be the same.
    """
    options = task.training
    return header.ends_epoch or (
        len(counts) > 0
        and (header.counts, header.marks) == (tuple(counts), tuple(marks))
        and header.batch_size == options.batch_size
        and header.steps_per_epoch == options.steps_per_epoch
        and (header.seed, header.shuffle) == (task.config.seed, options.shuffle)
    )
