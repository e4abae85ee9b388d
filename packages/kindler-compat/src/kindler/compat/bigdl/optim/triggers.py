"""BigDL's triggers: Kindler's own, with BigDL's names of arguments.

They fire after iteration k, 2k and so on, and after every epoch; `MaxEpoch` and `MaxIteration` count from
when the model was new, through checkpoints and earlier runs.
"""

from __future__ import annotations

from kindler.train import triggers

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


class EveryEpoch(triggers.EveryEpoch):
    """Fires after every epoch."""

    def __init__(self, bigdl_type: str = "float") -> None:
        super().__init__()


class SeveralIteration(triggers.SeveralIteration):
    """Fires after every `interval` iterations, and after every epoch."""

    def __init__(self, interval: int, bigdl_type: str = "float") -> None:
        super().__init__(interval)


class MaxEpoch(triggers.MaxEpoch):
    """Fires once `max_epoch` epochs have ended since the model was new."""

    def __init__(self, max_epoch: int, bigdl_type: str = "float") -> None:
        super().__init__(max_epoch)


class MaxIteration(triggers.MaxIteration):
    """Fires once `max` iterations were made since the model was new."""

    def __init__(self, max: int, bigdl_type: str = "float") -> None:  # noqa: A002 - BigDL's name
        super().__init__(max)


class MaxScore(triggers.MaxScore):
    """Fires after an epoch whose first validation metric is above `max`."""

    def __init__(self, max: float, bigdl_type: str = "float") -> None:  # noqa: A002 - BigDL's name
        super().__init__(max)


class MinLoss(triggers.MinLoss):
    """Fires after an epoch whose training loss is below `min`."""

    def __init__(self, min: float, bigdl_type: str = "float") -> None:  # noqa: A002 - BigDL's name
        super().__init__(min)


class TriggerAnd(triggers.TriggerAnd):
    """Fires when all of its triggers do."""

    def __init__(self, first: triggers.Trigger, *other: triggers.Trigger) -> None:
        super().__init__(first, *other)


class TriggerOr(triggers.TriggerOr):
    """Fires when any of its triggers does."""

    def __init__(self, first: triggers.Trigger, *other: triggers.Trigger) -> None:
        super().__init__(first, *other)
