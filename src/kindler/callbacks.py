"""Callbacks of `fit`: yours, which extend `Callback` or `DriverCallback`, and those that come with Kindler.

A `Callback` runs on every worker; a `DriverCallback` runs once, where `fit` was called.
"""

from kindler.tracking.logger import MLflowLogger
from kindler.train.callbacks import (
    Callback,
    DriverCallback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    Run,
    TensorBoard,
)
from kindler.train.triggers import Progress

__all__ = [
    "Callback",
    "DriverCallback",
    "EarlyStopping",
    "LearningRateMonitor",
    "MLflowLogger",
    "ModelCheckpoint",
    "Progress",
    "Run",
    "TensorBoard",
]
