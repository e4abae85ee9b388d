"""When to write a checkpoint, and when to end: small values that answer yes or no.

A trigger decides by the `Progress` it is shown and by nothing else, so that all workers decide alike. Who
asks, and what then happens, is the loop's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kindler.errors import ConfigError

__all__ = [
    "EveryEpoch",
    "MaxEpoch",
    "MaxIteration",
    "MaxScore",
    "MinLoss",
    "Progress",
    "SeveralIteration",
    "Trigger",
    "TriggerAnd",
    "TriggerOr",
    "score_of",
]

_NO_SCORES = frozenset({"epoch", "steps", "num_samples", "loss", "lr", "seconds", "rows_per_s"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far training is, as a trigger sees it: the same on all workers.

    Attributes:
        epoch: Epochs begun since the model was new.
        step: Optimizer steps since then.
        epoch_ended: Whether the epoch is over; otherwise a step of it has just been made.
        loss: The epoch's training loss over all workers; None within an epoch.
        score: The first metric of the validation, or of training without one; None within an epoch.
    """

    epoch: int
    step: int
    epoch_ended: bool = False
    loss: float | None = None
    score: float | None = None


class Trigger:
    """The base of all triggers. One of your own must decide by its argument alone."""

    def __call__(self, progress: Progress) -> bool:
        """Whether it fires now."""
        raise NotImplementedError


@dataclass(frozen=True)
class EveryEpoch(Trigger):
    """Fires after every epoch.

    >>> EveryEpoch()(Progress(epoch=1, step=10, epoch_ended=True))
    True
    """

    def __call__(self, progress: Progress) -> bool:
        """Whether an epoch has ended."""
        return progress.epoch_ended


@dataclass(frozen=True)
class SeveralIteration(Trigger):
    """Fires after step `interval`, twice that, and so on, and after every epoch.

    >>> SeveralIteration(5)(Progress(epoch=1, step=10)), SeveralIteration(5)(Progress(epoch=1, step=11))
    (True, False)
    """

    interval: int

    def __post_init__(self) -> None:
        _whole("SeveralIteration", self.interval)

    def __call__(self, progress: Progress) -> bool:
        """Whether the step is a multiple of the interval, or an epoch has ended."""
        return progress.epoch_ended or progress.step % self.interval == 0


@dataclass(frozen=True)
class MaxEpoch(Trigger):
    """Fires once `epochs` epochs are over, counted since the model was new."""

    epochs: int

    def __post_init__(self) -> None:
        _whole("MaxEpoch", self.epochs)

    def __call__(self, progress: Progress) -> bool:
        """Whether that many epochs are over."""
        return progress.epoch - (not progress.epoch_ended) >= self.epochs


@dataclass(frozen=True)
class MaxIteration(Trigger):
    """Fires once `steps` steps are made, counted since the model was new."""

    steps: int

    def __post_init__(self) -> None:
        _whole("MaxIteration", self.steps)

    def __call__(self, progress: Progress) -> bool:
        """Whether that many steps are made."""
        return progress.step >= self.steps


@dataclass(frozen=True)
class MaxScore(Trigger):
    """Fires after an epoch whose score is more than `score`; see `Progress.score`."""

    score: float

    def __call__(self, progress: Progress) -> bool:
        """Whether the score is above the limit."""
        return progress.score is not None and progress.score > self.score


@dataclass(frozen=True)
class MinLoss(Trigger):
    """Fires after an epoch whose training loss is less than `loss`."""

    loss: float

    def __call__(self, progress: Progress) -> bool:
        """Whether the loss is below the limit."""
        return progress.loss is not None and progress.loss < self.loss


@dataclass(frozen=True, init=False)
class TriggerAnd(Trigger):
    """Fires when all of its triggers do."""

    triggers: tuple[Trigger, ...]

    def __init__(self, *triggers: Trigger) -> None:
        object.__setattr__(self, "triggers", _some("TriggerAnd", triggers))

    def __call__(self, progress: Progress) -> bool:
        """Whether all fire."""
        return all(trigger(progress) for trigger in self.triggers)


@dataclass(frozen=True, init=False)
class TriggerOr(Trigger):
    """Fires when one of its triggers does."""

    triggers: tuple[Trigger, ...]

    def __init__(self, *triggers: Trigger) -> None:
        object.__setattr__(self, "triggers", _some("TriggerOr", triggers))

    def __call__(self, progress: Progress) -> bool:
        """Whether one fires."""
        return any(trigger(progress) for trigger in self.triggers)


def score_of(row: Mapping[str, Any]) -> float | None:
    """The score of an epoch, out of its row of the history.

    >>> score_of({"epoch": 1, "loss": 0.5, "accuracy": 0.8, "val_loss": 0.6, "val_accuracy": 0.7})
    0.7
    """
    metrics = [name for name in row if name.removeprefix("val_") not in _NO_SCORES]
    judged = [name for name in metrics if name.startswith("val_")]
    return next((float(row[name]) for name in (*judged, *metrics)), None)


def _whole(name: str, given: Any) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ConfigError(f"{name}({given!r}): must be an integer of at least 1.")


def _some(name: str, triggers: tuple[Any, ...]) -> tuple[Trigger, ...]:
    wrong = [trigger for trigger in triggers if not isinstance(trigger, Trigger)]
    if wrong or not triggers:
        raise ConfigError(f"{name} takes one or more triggers; received {wrong[0] if wrong else 'none'!r}.")
    return triggers
