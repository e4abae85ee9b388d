"""`zoo.pipeline.nnframes`: BigDL's models as stages of Spark ML."""

from __future__ import annotations

from kindler.compat.zoo.pipeline.nnframes.nn_classifier import (
    NNClassifier,
    NNClassifierModel,
    NNEstimator,
    NNModel,
)

__all__ = ["NNClassifier", "NNClassifierModel", "NNEstimator", "NNModel"]
