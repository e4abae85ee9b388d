"""Graphs of TensorFlow 1. Here: what model functions and input functions return; imports no TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from kindler.data.column_options import Names

if TYPE_CHECKING:
    import tensorflow.compat.v1 as tf

    from kindler.types import Data

GraphTensors: TypeAlias = "tf.Tensor | Sequence[tf.Tensor] | Mapping[str, tf.Tensor]"
_Optimizer: TypeAlias = "tf.train.Optimizer | str"
GraphOptimizer: TypeAlias = "_Optimizer | Mapping[str, _Optimizer] | Callable[..., _Optimizer]"
GraphMetrics: TypeAlias = "Mapping[str, tf.Tensor | tuple[tf.Tensor, tf.Operation]]"


class ModeKeys:
    """What a model function is asked to build."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@dataclass(frozen=True)
class EstimatorSpec:
    """What a model function returns.

    Attributes:
        mode: The mode it was called with.
        predictions: A tensor, or a dict of them.
        loss: A scalar: the mean over rows. Needed to train and to evaluate.
        train_op: What `minimize` of a `tf.train.Optimizer` returned; None where the estimator has an
            optimizer.
        eval_metric_ops: A dict from names to pairs of `tf.metrics`, or to tensors that are means over rows.
    """

    mode: str
    predictions: GraphTensors | None = None
    loss: tf.Tensor | None = None
    train_op: tf.Operation | None = None
    eval_metric_ops: GraphMetrics | None = None


@dataclass(frozen=True, kw_only=True)
class InputData:
    """What an input function returns if the data alone is not enough.

    Attributes:
        data: Data of any kind that `Estimator.fit` takes.
        batch_size: Rows per step, over all workers together.
        feature_cols: The columns that the model function gets as features.
        label_cols: The columns that it gets as labels.
        options: More options of `fit`, `evaluate` and `predict`, such as `shapes`.
    """

    data: Data
    batch_size: int = 32
    feature_cols: Names = None
    label_cols: Names = None
    options: Mapping[str, Any] = field(default_factory=dict)
