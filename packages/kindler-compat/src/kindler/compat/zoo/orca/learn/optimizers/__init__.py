"""`zoo.orca.learn.optimizers`: BigDL's optimizers."""

from __future__ import annotations

from kindler.compat.bigdl.optim.methods import (
    LBFGS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    Ftrl,
    ParallelAdam,
    RMSprop,
)

__all__ = ["LBFGS", "SGD", "Adadelta", "Adagrad", "Adam", "Adamax", "Ftrl", "ParallelAdam", "RMSprop"]
