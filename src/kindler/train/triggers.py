"""Triggers: when to write a checkpoint, and when to stop training.

A trigger decides by its `Progress` argument alone, so that all workers decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kindler.errors import ConfigError
from kindler.train.metric_names import BOOKKEEPING

_NO_SCORES = BOOKKEEPING | {"loss", "lr"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far training has come; the same on all workers.

    Attributes:
        epoch: The current epoch, counted from 1 since the model was created.
        step: Optimizer steps since the model was created.
        epoch_ended: True at the end of an epoch, False after a step within one.
        loss: The epoch's training loss over all workers; None within an epoch.
        score: The first validation metric, or the first training metric without validation; None within an
            epoch.
    """

    epoch: int
    step: int
    epoch_ended: bool = False
    loss: float | None = None
    score: float | None = None


class Trigger:
    """Base class of triggers. Your own must decide by its argument alone, as every worker evaluates it."""

    def __call__(self, progress: Progress) -> bool:
        """Whether the trigger fires now."""
        raise NotImplementedError


@dataclass(frozen=True)
class EveryEpoch(Trigger):
    """Fires after every epoch.

    >>> EveryEpoch()(Progress(epoch=1, step=10, epoch_ended=True))
    True
    """

    def __call__(self, progress: Progress) -> bool:
        return progress.epoch_ended


class _Counting(Trigger):
    def __post_init__(self) -> None:
        [value] = vars(self).values()
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{type(self).__name__}({value!r}): must be an integer of at least 1.")


@dataclass(frozen=True)
class SeveralIteration(_Counting):
    """Fires after step `interval`, twice that, and so on, and after every epoch.

    >>> SeveralIteration(5)(Progress(epoch=1, step=10)), SeveralIteration(5)(Progress(epoch=1, step=11))
    (True, False)
    """

    interval: int

    def __call__(self, progress: Progress) -> bool:
        return progress.epoch_ended or progress.step % self.interval == 0


@dataclass(frozen=True)
class MaxEpoch(_Counting):
    """Fires once `epochs` epochs have ended since the model was created."""

    epochs: int

    def __call__(self, progress: Progress) -> bool:
        return progress.epoch - (not progress.epoch_ended) >= self.epochs


@dataclass(frozen=True)
class MaxIteration(_Counting):
    """Fires once `steps` steps have been made since the model was created."""

    steps: int

    def __call__(self, progress: Progress) -> bool:
        return progress.step >= self.steps


@dataclass(frozen=True)
class MaxScore(Trigger):
    """Fires after an epoch whose `Progress.score` is above `score`."""

    score: float

    def __call__(self, progress: Progress) -> bool:
        return progress.score is not None and progress.score > self.score


@dataclass(frozen=True)
class MinLoss(Trigger):
    """Fires after an epoch whose training loss is below `loss`."""

    loss: float

    def __call__(self, progress: Progress) -> bool:
        return progress.loss is not None and progress.loss < self.loss


@dataclass(frozen=True, init=False)
class _Several(Trigger):
    triggers: tuple[Trigger, ...]

    def __init__(self, *triggers: Trigger) -> None:
        wrong = [trigger for trigger in triggers if not isinstance(trigger, Trigger)]
        if wrong or not triggers:
            received = wrong[0] if wrong else "none"
            raise ConfigError(f"{type(self).__name__} takes one or more triggers; received {received!r}.")
        object.__setattr__(self, "triggers", triggers)


class TriggerAnd(_Several):
    """Fires when all of its triggers do."""

    def __call__(self, progress: Progress) -> bool:
        return all(trigger(progress) for trigger in self.triggers)


class TriggerOr(_Several):
    """Fires when any of its triggers does."""

    def __call__(self, progress: Progress) -> bool:
        return any(trigger(progress) for trigger in self.triggers)


def end_of_epoch(epoch: int, step: int, row: Mapping[str, Any]) -> Progress:
    return Progress(epoch=epoch, step=step, epoch_ended=True, loss=row.get("loss"), score=score_of(row))


def score_of(row: Mapping[str, Any]) -> float | None:
    """The score of an epoch, from its row of the history.

    >>> score_of({"epoch": 1, "loss": 0.5, "accuracy": 0.8, "val_loss": 0.6, "val_accuracy": 0.7})
    0.7
    """
    numbers = [name for name, value in row.items() if isinstance(value, int | float)]  # the others are curves
    metrics = [name for name in numbers if name.removeprefix("val_") not in _NO_SCORES]
    judged = [name for name in metrics if name.startswith("val_")]
    return next((float(row[name]) for name in (*judged, *metrics)), None)
