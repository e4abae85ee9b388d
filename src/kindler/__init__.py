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
    from kindler.train.history import History as History

__version__ = "0.1.0"

_PUBLIC = {
    "Callback": "kindler.train.callbacks",
    "Estimator": "kindler.estimator",
    "History": "kindler.train.history",
    "RunSettings": "kindler.config",
    "errors": "kindler",
    "init": "kindler.spark.session",
    "stop": "kindler.spark.session",
}

__all__ = ["Callback", "Estimator", "History", "RunSettings", "__version__", "errors", "init", "stop"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kindler' has no attribute {name!r}")
    if name == "errors":
        return importlib.import_module("kindler.errors")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
