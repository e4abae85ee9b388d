"""`zoo.tfpark`: TensorFlow models on Spark."""

from __future__ import annotations

from kindler.compat.zoo.tfpark.estimator import TFEstimator, TFEstimatorSpec
from kindler.compat.zoo.tfpark.gan import GANEstimator
from kindler.compat.zoo.tfpark.model import KerasModel
from kindler.compat.zoo.tfpark.tf_dataset import TFDataset
from kindler.compat.zoo.tfpark.tf_optimizer import TFOptimizer
from kindler.compat.zoo.tfpark.tf_predictor import TFPredictor
from kindler.compat.zoo.tfpark.tfnet import TFNet
from kindler.compat.zoo.tfpark.zoo_optimizer import ZooOptimizer

__all__ = [
    "GANEstimator",
    "KerasModel",
    "TFDataset",
    "TFEstimator",
    "TFEstimatorSpec",
    "TFNet",
    "TFOptimizer",
    "TFPredictor",
    "ZooOptimizer",
]
