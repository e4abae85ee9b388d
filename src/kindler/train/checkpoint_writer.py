"""Writes the checkpoints of a run when its trigger or a callback requests one.

All workers call it at the same steps: in the middle of an epoch each contributes its own state, and the first
one writes. Files are written by `checkpoint_dir.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from kindler.errors import ConfigError
from kindler.group import Group
from kindler.train.checkpoint_dir import Checkpoints
from kindler.train.checkpoint_file import Header, pack
from kindler.train.run_start import Start
from kindler.train.task import Task
from kindler.train.triggers import EveryEpoch, Progress


class FreezableReplica(Protocol):
    """The part of a replica that checkpoints use."""

    epoch: int
    step: int

    def freeze(self) -> Callable[[], Sequence[bytes | memoryview]]: ...
    def local_state(self) -> bytes: ...


class CheckpointWriter:
    """Decides after each step and epoch whether to write a checkpoint; a context manager.

    Attributes:
        active: Whether the run writes checkpoints.

    Args:
        worker: This worker.
        task: The run; without a `model_dir` nothing is written.
        counts: Rows of every lane.
        marks: Fingerprints of those rows (`Batches.marks`).
        start: Where the run began.
        callbacks: Those whose states are saved; `state_dict` is called on the first worker.
        anywhere: Whether another worker may become the first.
        whole: What a checkpoint is made of (`Sync.whole`); called on all workers when one is due.
        look: Called before one is written within an epoch; raises if the weights are not worth keeping.
    """

    def __init__(
        self,
        worker: Group,
        task: Task,
        *,
        counts: Sequence[int],
        marks: Sequence[str] = (),
        start: Start,
        callbacks: Sequence[Any] = (),
        anywhere: bool = False,
        whole: Callable[[Any], FreezableReplica] | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        options = task.training
        self._worker = worker
        self._whole, self._look = whole, look
        self._callbacks = callbacks
        self._epochs = options.epochs_to_train
        self._trigger = options.checkpoint_trigger or EveryEpoch()
        self.active = task.model_dir is not None
        self._folder = (
            Checkpoints(task.model_dir, keep=options.keep_checkpoints, best=options.best_metric)
            if task.model_dir is not None and (worker.rank == 0 or anywhere)
            else None
        )
        self._header = Header(
            framework=task.framework,
            epoch=0,
            step=0,
            run=task.run_id,
            first_epoch=start.first_epoch,
            first_step=start.first_step,
            counts=tuple(counts),
            marks=tuple(marks),
            lanes=task.dealing.lanes if task.dealing is not None else 0,
            workers=task.dealing.workers if task.dealing is not None else 0,
            batch_size=options.batch_size,
            steps_per_epoch=options.steps_per_epoch,
            seed=task.seed,
            shuffle=options.shuffle,
            rows=start.rows,
        )

    def after_step(
        self, replica: FreezableReplica, *, step_in_epoch: int, seconds: float, asked: bool = False
    ) -> None:
        """Write one within an epoch if it is due. Not for the last step of an epoch.

        Args:
            replica: The replica.
            step_in_epoch: Steps made in this epoch.
            seconds: Their duration.
            asked: Whether a callback requested it; the same on all workers.
        """
        if not self.active:
            return
        if not asked and not self._trigger(Progress(epoch=replica.epoch, step=replica.step)):
            return
        self._look()
        local_states = self._worker.to_first(replica.local_state())
        self._save(replica, local_states, step_in_epoch=step_in_epoch, seconds=seconds)

    def after_epoch(
        self,
        replica: FreezableReplica,
        progress: Progress,
        row: Mapping[str, Any],
        *,
        stopped: str | None = None,
        asked: bool = False,
    ) -> None:
        """Record an epoch's row of the history, and write a checkpoint if one is due.

        Args:
            replica: The replica, ready for the next epoch.
            progress: What the trigger decides by.
            row: The epoch's row.
            stopped: Why a callback ends the run here, or None.
            asked: Whether a callback requested a checkpoint.
        """
        self._header = replace(self._header, rows=(*self._header.rows, dict(row)))
        if self.active and (asked or self._trigger(progress)):
            self._save(replica, (), stopped=stopped)

    def epoch_is_over(self, replica: FreezableReplica, *, stopped: str | None = None) -> None:
        """After all that an epoch ends with: let a process that takes the place of this one go on from here.

        Args:
            replica: This worker's own replica.
            stopped: Why a callback ends the run here, or None.
        """
        if not self._worker.replaceable:
            return
        if self._folder is not None:
            self._folder.wait()  # the replica freezes into memory that the writer still reads
        states = callback_states(self._callbacks)
        header = replace(
            self._header, epoch=replica.epoch, step=replica.step, callbacks=states, stopped=stopped
        )
        self._worker.keep(b"".join(pack(header, replica.freeze()())))

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception:
            if exc is None:  # otherwise raise that one
                raise

    def close(self) -> None:
        """Wait for the write in progress, and raise its error."""
        if self._folder is not None:
            self._folder.wait()

    def _save(self, replica: FreezableReplica, local_states: Sequence[bytes], **fields: Any) -> None:
        if self._whole is not None:
            replica = self._whole(replica)  # workers may have to meet for it
        if self._folder is None or not self._worker.leads:
            return
        states = callback_states(self._callbacks)
        header = replace(self._header, epoch=replica.epoch, step=replica.step, callbacks=states, **fields)
        self._folder.wait()  # the replica freezes into memory that the writer still reads
        self._folder.save(header, replica.freeze(), local_states, then=partial(self._tell, header))

    def _tell(self, header: Header) -> None:
        """Let the driver know that it may start workers anew from here."""
        if header.ends_epoch and not self._worker.replaceable:
            ends = header.stopped is not None or header.epoch >= header.first_epoch + self._epochs
            self._worker.report("saved", epoch=header.epoch, ends=ends)


def callback_states(callbacks: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    """The class name and state of each callback.

    Raises:
        ConfigError: A state is not JSON.
    """
    states = []
    for callback in callbacks:
        state = callback.state_dict() if hasattr(callback, "state_dict") else None
        try:
            states.append({"type": type(callback).__name__, "state": json.loads(json.dumps(state))})
        except (TypeError, ValueError) as exc:
            raise ConfigError(
                f"{type(callback).__name__}.state_dict() returned {state!r}, which is not JSON: {exc}.\n"
                "Hint: return numbers, strings, lists and dicts."
            ) from exc
    return tuple(states)


def restore_callbacks(callbacks: Sequence[Any], states: Sequence[Mapping[str, Any]]) -> None:
    """Restore the states of callbacks; one that is new, or of another class than before, stays as it is."""
    for callback, entry in zip(callbacks, states, strict=False):
        if entry["state"] and entry["type"] == type(callback).__name__:
            callback.load_state_dict(entry["state"])
