"""BigDL's triggers: Kindler's own, with BigDL's names of arguments.

They fire after iteration k, 2k and so on, and after every epoch; `MaxEpoch` and `MaxIteration` count from
when the model was new, through checkpoints and earlier runs.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

from kindler.compat.bigdl.arguments import arguments as _arguments
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

T = TypeVar("T", bound=triggers.Trigger)


def _named(base: type[T], *arguments: str) -> type[T]:
    """A trigger of Kindler's whose argument has BigDL's name."""
    takes = _arguments(*arguments)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = takes.bind(*args, **kwargs)
        base.__init__(self, *(value for name, value in bound.arguments.items() if name != "bigdl_type"))

    body = {"__module__": __name__, "__doc__": base.__doc__, "__init__": __init__, "__signature__": takes}
    return cast(type[T], type(base.__name__, (base,), body))


EveryEpoch = _named(triggers.EveryEpoch)
SeveralIteration = _named(triggers.SeveralIteration, "interval")
MaxEpoch = _named(triggers.MaxEpoch, "max_epoch")
MaxIteration = _named(triggers.MaxIteration, "max")
MaxScore = _named(triggers.MaxScore, "max")
MinLoss = _named(triggers.MinLoss, "min")


class TriggerAnd(triggers.TriggerAnd):
    """Fires when all of its triggers do."""

    def __init__(self, first: triggers.Trigger, *other: triggers.Trigger) -> None:
        super().__init__(first, *other)


class TriggerOr(triggers.TriggerOr):
    """Fires when any of its triggers does."""

    def __init__(self, first: triggers.Trigger, *other: triggers.Trigger) -> None:
        super().__init__(first, *other)
