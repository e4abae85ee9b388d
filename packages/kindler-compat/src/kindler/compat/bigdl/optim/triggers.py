"""BigDL's triggers: functions of `Progress` for Kindler's `fit`, too.

They fire after iteration k, 2k and so on, and after every epoch; `MaxEpoch` and `MaxIteration` count from
when the model was new, through checkpoints and earlier runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kindler.errors import ConfigError
from kindler.train.triggers import Progress

__all__ = [
    "EveryEpoch",
    "MaxEpoch",
    "MaxIteration",
    "MaxScore",
    "MinLoss",
    "SeveralIteration",
    "TriggerAnd",
    "TriggerOr",
]


class Trigger:
    """Base class of triggers. Your own must decide by its argument alone, as every worker evaluates it."""

    def __call__(self, progress: Progress) -> bool:
        """Whether the trigger fires now."""
        raise NotImplementedError


def _unused() -> str:
    return field(default="float", repr=False, compare=False)


class _Counting(Trigger):
    def __post_init__(self) -> None:
        value = next(iter(vars(self).values()))
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{type(self).__name__}({value!r}): must be an integer of at least 1.")


@dataclass(frozen=True)
class EveryEpoch(Trigger):
    """Fires after every epoch."""

    bigdl_type: str = _unused()

    def __call__(self, progress: Progress) -> bool:
        return progress.epoch_ended


@dataclass(frozen=True)
class SeveralIteration(_Counting):
    """Fires after step `interval`, twice that, and so on, and after every epoch."""

    interval: int
    bigdl_type: str = _unused()

    def __call__(self, progress: Progress) -> bool:
        return progress.epoch_ended or progress.step % self.interval == 0


@dataclass(frozen=True)
class MaxEpoch(_Counting):
    """Fires once `max_epoch` epochs have ended since the model was created."""

    max_epoch: int
    bigdl_type: str = _unused()

    def __call__(self, progress: Progress) -> bool:
        return progress.epoch - (not progress.epoch_ended) >= self.max_epoch


@dataclass(frozen=True)
class MaxIteration(_Counting):
    """Fires once `max` steps have been made since the model was created."""

    max: int
    bigdl_type: str = _unused()

    def __call__(self, progress: Progress) -> bool:
        return progress.step >= self.max


@dataclass(frozen=True)
class MaxScore(Trigger):
    """Fires after an epoch whose first metric, of validation if there is one, is above `max`."""

    max: float
    bigdl_type: str = _unused()

    def __call__(self, progress: Progress) -> bool:
        return progress.score is not None and progress.score > self.max


@dataclass(frozen=True)
class MinLoss(Trigger):
    """Fires after an epoch whose training loss is below `min`."""

    min: float
    bigdl_type: str = _unused()

    def __call__(self, progress: Progress) -> bool:
        return progress.loss is not None and progress.loss < self.min


@dataclass(frozen=True, init=False)
class _Several(Trigger):
    triggers: tuple[Trigger, ...]

    def __init__(self, first: Trigger, *other: Trigger) -> None:
        for trigger in (first, *other):
            if not isinstance(trigger, Trigger):
                raise ConfigError(f"{type(self).__name__} takes triggers; received {trigger!r}.")
        object.__setattr__(self, "triggers", (first, *other))


class TriggerAnd(_Several):
    """Fires when all of its triggers do."""

    def __call__(self, progress: Progress) -> bool:
        return all(trigger(progress) for trigger in self.triggers)


class TriggerOr(_Several):
    """Fires when any of its triggers does."""

    def __call__(self, progress: Progress) -> bool:
        return any(trigger(progress) for trigger in self.triggers)
