"""`zoo.orca.learn.trigger`."""

from __future__ import annotations

from kindler.compat.bigdl.optim.triggers import (
    EveryEpoch,
    MaxEpoch,
    MaxIteration,
    MaxScore,
    MinLoss,
    SeveralIteration,
    TriggerAnd,
    TriggerOr,
)

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
