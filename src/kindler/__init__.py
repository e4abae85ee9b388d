"""Kindler: train, score, store and serve deep-learning models where the data already is, in Spark.

Public names are found on first use: importing kindler loads no framework and no pyspark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kindler.config import RunSettings as RunSettings
    from kindler.estimator import Estimator as Estimator
    from kindler.spark.session import init as init
    from kindler.spark.session import stop as stop
    from kindler.train.callbacks import Callback as Callback
    from kindler.train.callbacks import EarlyStopping as EarlyStopping
    from kindler.train.callbacks import LearningRateMonitor as LearningRateMonitor
    from kindler.train.callbacks import ModelCheckpoint as ModelCheckpoint
    from kindler.train.history import History as History
    from kindler.train.triggers import EveryEpoch as EveryEpoch
    from kindler.train.triggers import MaxEpoch as MaxEpoch
    from kindler.train.triggers import MaxIteration as MaxIteration
    from kindler.train.triggers import MaxScore as MaxScore
    from kindler.train.triggers import MinLoss as MinLoss
    from kindler.train.triggers import SeveralIteration as SeveralIteration
    from kindler.train.triggers import TriggerAnd as TriggerAnd
    from kindler.train.triggers import TriggerOr as TriggerOr
    from kindler.xshards import SharedValue as SharedValue
    from kindler.xshards import XShards as XShards

__version__ = "0.1.0"

_PUBLIC = {
    "Callback": "kindler.train.callbacks",
    "EarlyStopping": "kindler.train.callbacks",
    "Estimator": "kindler.estimator",
    "EveryEpoch": "kindler.train.triggers",
    "History": "kindler.train.history",
    "LearningRateMonitor": "kindler.train.callbacks",
    "MaxEpoch": "kindler.train.triggers",
    "MaxIteration": "kindler.train.triggers",
    "MaxScore": "kindler.train.triggers",
    "MinLoss": "kindler.train.triggers",
    "ModelCheckpoint": "kindler.train.callbacks",
    "RunSettings": "kindler.config",
    "SeveralIteration": "kindler.train.triggers",
    "SharedValue": "kindler.xshards",
    "TriggerAnd": "kindler.train.triggers",
    "TriggerOr": "kindler.train.triggers",
    "XShards": "kindler.xshards",
    "errors": "kindler",
    "init": "kindler.spark.session",
    "stop": "kindler.spark.session",
}

__all__ = [
    "Callback",
    "EarlyStopping",
    "Estimator",
    "EveryEpoch",
    "History",
    "LearningRateMonitor",
    "MaxEpoch",
    "MaxIteration",
    "MaxScore",
    "MinLoss",
    "ModelCheckpoint",
    "RunSettings",
    "SeveralIteration",
    "SharedValue",
    "TriggerAnd",
    "TriggerOr",
    "XShards",
    "__version__",
    "errors",
    "init",
    "stop",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kindler' has no attribute {name!r}")
    if name == "errors":
        return importlib.import_module("kindler.errors")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
