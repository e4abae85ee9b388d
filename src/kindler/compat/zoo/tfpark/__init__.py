"""`zoo.tfpark`: TensorFlow models on Spark."""

from __future__ import annotations

from kindler.compat.zoo.tfpark.model import KerasModel
from kindler.compat.zoo.tfpark.tf_dataset import TFDataset

__all__ = ["KerasModel", "TFDataset"]
