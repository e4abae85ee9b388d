"""`zoo.tfpark`: TensorFlow models on Spark.

Names are found on first use: executors, which only take rows apart, do not import TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kindler.compat.frameworks.tf_graph.legacy_keras import restore_legacy_keras

if TYPE_CHECKING:
    from kindler.compat.zoo.tfpark.estimator import TFEstimator as TFEstimator
    from kindler.compat.zoo.tfpark.estimator import TFEstimatorSpec as TFEstimatorSpec
    from kindler.compat.zoo.tfpark.gan import GANEstimator as GANEstimator
    from kindler.compat.zoo.tfpark.model import KerasModel as KerasModel
    from kindler.compat.zoo.tfpark.tf_dataset import TFDataset as TFDataset
    from kindler.compat.zoo.tfpark.tf_optimizer import TFOptimizer as TFOptimizer
    from kindler.compat.zoo.tfpark.tf_predictor import TFPredictor as TFPredictor
    from kindler.compat.zoo.tfpark.tfnet import TFNet as TFNet
    from kindler.compat.zoo.tfpark.zoo_optimizer import ZooOptimizer as ZooOptimizer

_MODULES = {
    "GANEstimator": "gan",
    "KerasModel": "model",
    "TFDataset": "tf_dataset",
    "TFEstimator": "estimator",
    "TFEstimatorSpec": "estimator",
    "TFNet": "tfnet",
    "TFOptimizer": "tf_optimizer",
    "TFPredictor": "tf_predictor",
    "ZooOptimizer": "zoo_optimizer",
}

__all__ = [*_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    restore_legacy_keras()
    return found
