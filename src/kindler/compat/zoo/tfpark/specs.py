"""What TensorFlow no longer has of `tf.estimator`: modes of a model function, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["EstimatorSpec", "ModeKeys"]


class ModeKeys:
    """What a model function is called for."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@dataclass
class EstimatorSpec:
    """What a model function returns.

    Attributes:
        mode: One of `ModeKeys`.
        predictions: A tensor, or a dict of tensors.
        loss: A scalar tensor, in training and evaluation.
        train_op: The operation of a training step, such as `ZooOptimizer(...).minimize(loss)` returns.
        eval_metric_ops: Accepted without effect: `evaluate` computes the methods it is asked for.
    """

    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    eval_metric_ops: Any = None
