"""Estimators of graphs of TensorFlow 1, of model functions, and of MXNet's blocks. Loads neither framework.

Users call them as `Estimator.from_graph` and so on: they are entry points of the group `kindler.estimators`,
which are called with the class that an estimator is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias

from kindler import Device, Estimator, RunSettings
from kindler.compat.frameworks.mxnet import create_config
from kindler.compat.frameworks.tf_graph import (
    EstimatorSpec,
    GraphMetrics,
    GraphOptimizer,
    GraphTensors,
    InputData,
    ModeKeys,
)
from kindler.errors import ConfigError
from kindler.frameworks.caller_state import leaves_no_trace
from kindler.frameworks.registry import FRAMEWORKS
from kindler.train.options import Engine

if TYPE_CHECKING:
    import mxnet as mx
    import tensorflow.compat.v1 as tf

    from kindler.compat.frameworks.tf_graph.model_fn import ModelFnEstimator

_MxnetMetrics: TypeAlias = "mx.metric.EvalMetric | Sequence[mx.metric.EvalMetric]"

__all__ = [
    "EstimatorSpec",
    "InputData",
    "ModeKeys",
    "create_config",
    "from_graph",
    "from_model_fn",
    "from_mxnet",
]


@leaves_no_trace
def from_graph(
    cls: type[Estimator],
    *,
    inputs: GraphTensors,
    outputs: GraphTensors | None = None,
    labels: GraphTensors | None = None,
    loss: tf.Tensor | None = None,
    optimizer: GraphOptimizer | None = None,
    metrics: GraphMetrics | None = None,
    clip_norm: float | None = None,
    clip_value: float | tuple[float, float] | None = None,
    updates: Sequence[tf.Operation] | None = None,
    sess: tf.Session | None = None,
    train_op: tf.Operation | None = None,
    tensor_with_value: Mapping[tf.Tensor | str, Any] | None = None,
    global_step: tf.Variable | None = None,
    session_config: tf.ConfigProto | None = None,
    config: Mapping[str, Any] | None = None,
    backend: str | None = None,
    device: str | Device = "auto",
    workers: int | None = None,
    engine: Engine = "auto",
    seed: int = 0,
    settings: RunSettings | None = None,
    **options: Any,
) -> Estimator:
    """Create an estimator from a TensorFlow graph, as programs of TensorFlow 1 build them.

    Training starts from the values that the session holds, and the session gets the trained ones, so that
    `tf.train.Saver().save(sess, ...)` saves them. `get_model()` returns the session. `tf` is
    `tensorflow.compat.v1` throughout.

    Args:
        inputs: The tensor that the feature column is fed to, usually a placeholder; or a list of them in
            the order of the columns, or a dict by the columns' names. The shape begins with None.
        outputs: What `predict` returns: a tensor, a list, or a dict whose keys name the output columns.
        labels: What label columns are fed to, like `inputs`. None for a loss that needs no labels.
        loss: A scalar tensor: the mean over the rows that are fed.
        optimizer: A `tf.train.Optimizer`, whose slots become part of the graph; a name, such as "adam";
            a dict from prefixes of variables' names to optimizers; or a function that is called with
            counters, whose tensors `step` and `epoch` a learning rate may depend on, and returns an
            optimizer.
        metrics: A dict from names to tensors that are means over the rows that are fed, or to pairs of
            `tf.metrics`.
        clip_norm: Clip the gradient of all variables together to this norm.
        clip_value: Clip each element of the gradient to this absolute value, or between a pair.
        updates: Operations that run with every step. None takes those of the graph's collection
            `UPDATE_OPS`, such as those of BatchNorm; `[]` is none.
        sess: The session with the variables' values. None takes the default session, or makes one and
            initializes every variable.
        train_op: Instead of `optimizer`: what `minimize` of a `tf.train.Optimizer` returned. Its
            gradients are found in the graph.
        tensor_with_value: A dict from tensors that no column is fed to, such as a rate of dropout, to a
            pair: the value in training, and the value otherwise. One value serves for both.
        global_step: The variable that counts steps. None takes the graph's own, if it has one.
        session_config: A `tf.ConfigProto` for the sessions of the workers.
        config: The argument of functions that make data.
        backend: Accepted for programs written for Orca ("bigdl"), without effect.
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        workers: Number of workers. None is one per slot of the Spark application; on this machine one per
            GPU, or one that uses all cores.
        engine: "spark", "local", or "auto": Spark if the data is in Spark.
        seed: Decides the order of rows, dropout, and what random operations of the graph draw.
        settings: Time limits, threads, shared memory, what to do about NaN losses.
        options: Of subclasses of `Estimator` alone.

    Raises:
        ConfigError: The graph cannot be trained or scored as the arguments say.
    """
    own = {name: value for name, value in locals().items() if name not in ("cls", "backend", "options")}
    if backend not in (None, "bigdl"):
        raise ConfigError(f"backend must be 'bigdl' or omitted; received {backend!r}.")
    return cls.from_framework("tf_graph", **own, **options)


def from_model_fn(
    cls: type[Estimator],
    model_fn: Callable[..., EstimatorSpec],
    optimizer: GraphOptimizer | None = None,
    model_dir: str | PathLike[str] | None = None,
    params: Any = None,
    config: Any = None,
    warm_start_from: str | PathLike[str] | None = None,
    **options: Any,
) -> ModelFnEstimator:
    """Create an estimator from a function that builds a TensorFlow graph, as `tf.estimator` had them.

    Args:
        model_fn: Called as `model_fn(features, labels, mode)`, with `params` and `config` where it takes
            them; returns an `EstimatorSpec`. `mode` is one of `ModeKeys`.
        optimizer: What `from_graph` takes. None where the spec has a `train_op`.
        model_dir: The folder for checkpoints, which `tf.train.Saver` reads as well. Training continues
            from the newest one.
        params: Passed to `model_fn`.
        config: Passed to `model_fn`.
        warm_start_from: A checkpoint, or a folder of them, that the first training takes the values of
            variables from, as far as it has them.
        options: More of `from_graph`: `workers`, `engine`, `clip_norm`, `session_config` and so on.
    """
    FRAMEWORKS.load("tf_graph")  # names what is not installed
    from kindler.compat.flat import FlatEstimator
    from kindler.compat.frameworks.tf_graph.model_fn import ModelFnEstimator

    flat = cls if issubclass(cls, FlatEstimator) else FlatEstimator
    return ModelFnEstimator(
        partial(from_graph, flat), model_fn, optimizer, model_dir, params, config, warm_start_from, options
    )


@leaves_no_trace
def from_mxnet(
    cls: type[Estimator],
    config: Mapping[str, Any] | None,
    model_creator: Callable[..., mx.gluon.Block],
    loss_creator: Callable[..., mx.gluon.loss.Loss] | None = None,
    eval_metrics_creator: Callable[..., _MxnetMetrics] | None = None,
    validation_metrics_creator: Callable[..., _MxnetMetrics] | None = None,
    workers: int | None = 2,
    *,
    engine: Engine = "auto",
    seed: int | None = None,
    settings: RunSettings | None = None,
) -> Estimator:
    """Create an estimator from a Gluon block of Apache MXNet 1.9.1.

    `fit` and `evaluate` also take functions of `(config, kv)` that return an MXNet data iterator or a
    Gluon DataLoader on each worker: `config["batch_size"]` is the worker's share, and `kv` has `rank` and
    `num_workers`.

    Args:
        config: The argument of all creators, such as `create_config` makes it:
            "optimizer" and "optimizer_params" are those of MXNet.
        model_creator: Called with `config`; returns a `mxnet.gluon.Block`.
        loss_creator: Called with `config`; returns a `mxnet.gluon.loss.Loss`. Not needed to predict.
        eval_metrics_creator: Called with `config`; returns the `mxnet.metric` objects of training.
        validation_metrics_creator: The same for validation and evaluation; None takes those of training.
        workers: Number of workers. None is one per slot of the Spark application, or one here.
        engine: "spark", "local", or "auto": Spark if the data is in Spark.
        seed: Decides the initial weights, the order of rows, and dropout. None is that of `config`, or 0.
        settings: Time limits, threads, shared memory.

    Raises:
        ConfigError: A creator is not a function.
        MissingExtraError: MXNet is not installed.
    """
    arguments = {name: value for name, value in locals().items() if name != "cls"}
    if seed is None:
        arguments["seed"] = config.get("seed", 0) if isinstance(config, Mapping) else 0
    return cls.from_framework("mxnet", device="cpu", **arguments)
