"""`zoo.orca.learn.optimizers.schedule`: learning-rate schedules."""

from __future__ import annotations

from kindler.compat.bigdl.optim.schedules import (
    Default,
    Exponential,
    MultiStep,
    NaturalExp,
    Poly,
    SequentialSchedule,
    Step,
    Warmup,
)

__all__ = [
    "Default",
    "Exponential",
    "MultiStep",
    "NaturalExp",
    "Poly",
    "SequentialSchedule",
    "Step",
    "Warmup",
]
