"""`zoo.tfpark`: TensorFlow models on Spark.

Names are found on first use: executors, which only take rows apart, do not import TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import Any

from kindler.compat.frameworks.tf_graph.legacy_keras import restore_legacy_keras

_MODULES = {
    "GANEstimator": "gan",
    "KerasModel": "model",
    "TFDataset": "tf_dataset",
    "TFEstimator": "estimator",
    "TFEstimatorSpec": "estimator",
    "TFNet": "tfnet",
    "TFOptimizer": "tf_optimizer",
    "TFPredictor": "tfnet",
    "ZooOptimizer": "optimizers",
}

__all__ = [*_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    restore_legacy_keras()
    return value
