"""Model functions: graphs that a function builds anew for training, judging and predicting.

`ModeKeys` and `EstimatorSpec` are what `tf.estimator`, which TensorFlow has no more, had under these names.
The variables of the three graphs have the same names, and their values go from one to the next by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kindler.collective import Array
from kindler.compat.frameworks.tf_graph.legacy_keras import restore_legacy_keras
from kindler.errors import ConfigError
from kindler.frameworks.creators import title


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
        loss: A scalar: the mean over rows. Needed to train and to judge.
        train_op: What `minimize` of a `tf.train.Optimizer` returned; None where the estimator has an
            optimizer.
        eval_metric_ops: A dict from names to pairs of `tf.metrics`, or to tensors that are means over rows.
    """

    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    eval_metric_ops: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A column that a placeholder is made for: its name, dtype, and the shape of a row."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class Built:
    """A graph that a model function has built.

    Attributes:
        graph: The graph.
        inputs: Placeholders of features, by the names of columns.
        labels: Placeholders of labels.
        predictions: What the function predicts.
        loss: The loss, or None.
        train_op: What it trains with, or None.
        metrics: Metrics by name, as `Estimator.from_graph` takes them.
    """

    graph: Any
    inputs: Mapping[str, Any]
    labels: Mapping[str, Any]
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


def build(
    model_fn: Callable[..., Any],
    mode: str,
    *,
    features: Sequence[Column],
    labels: Sequence[Column] = (),
    params: Any = None,
    config: Any = None,
    methods: Sequence[str] = (),
) -> Built:
    """Call a model function in a graph of its own, which has a global step.

    Args:
        model_fn: Called with `features` (a tensor, or a dict of several by name), `labels` likewise (None in
            prediction), `mode`, and with `params` and `config` where it takes them.
        mode: One of `ModeKeys`.
        features: The columns that are fed.
        labels: The same for labels.
        params: What the user gave for it.
        config: The same.
        methods: Names of metrics to make of predictions and labels: "acc", "top5acc", "mae", "mse", "auc".

    Raises:
        ConfigError: The function returned something else than a spec, or one without what the mode needs.
    """
    import tensorflow.compat.v1 as tf

    restore_legacy_keras()
    graph = tf.Graph()
    with graph.as_default():
        tf.train.get_or_create_global_step()
        inputs = {column.name: _placeholder(column, feature=True) for column in features}
        targets = {column.name: _placeholder(column, feature=False) for column in labels}
        spec = _called(model_fn, _as_argument(inputs), _as_argument(targets), mode, params, config)
        _check(spec, model_fn, mode)
        metrics = dict(getattr(spec, "eval_metric_ops", None) or {}) if mode == ModeKeys.EVAL else {}
        metrics |= {name: _metric(name, spec.predictions, targets) for name in methods if name != "loss"}
    return Built(
        graph=graph,
        inputs=inputs,
        labels=targets,
        predictions=spec.predictions,
        loss=getattr(spec, "loss", None),
        train_op=getattr(spec, "train_op", None),
        metrics=metrics,
    )


def restore(
    sess: Any, values: Mapping[str, Array], *, needs: Literal["all", "trainable", "nothing"] = "all"
) -> list[str]:
    """Give a session's variables these values, by name; returns the names of those that got one.

    Args:
        sess: The session.
        values: What was trained.
        needs: Which of its variables must have a value among them. Slots of another optimizer begin anew.

    Raises:
        ConfigError: One of these has none.
    """
    from kindler.compat.frameworks.tf_graph.reach import needed
    from kindler.compat.frameworks.tf_graph.variables import Values, ends_of

    with sess.graph.as_default():
        kept = sess.graph.get_collection("variables")
        ends = ends_of(sess.graph, needed([variable.op for variable in kept]))
    required = [v for v in ends if needs == "all" or (needs == "trainable" and v.trainable)]
    missing = [v.name for v in required if v.name not in values and v.name != "global_step:0"]
    if missing:
        raise ConfigError(
            f"there is no value for the variable {missing[0]!r} in {sorted(values)[:8]}; the model function"
            " builds other variables than those that were trained."
        )
    found = {v.name: values[v.name] for v in ends if v.name in values}
    Values(sess, ends).assign(found)
    return list(found)


def values_of(sess: Any) -> dict[str, Array]:
    """The values of all variables that checkpoints hold."""
    variables = sess.graph.get_collection("variables")
    with sess.graph.as_default():
        names = [variable.to_proto().snapshot_name for variable in variables]
    read = sess.run(names) if names else []
    return {variable.name: np.array(value) for variable, value in zip(variables, read, strict=True)}


def checkpoint_of(place: str) -> str | None:
    """The prefix of a checkpoint: that of a file, or of the newest in a folder; None where there is none."""
    import tensorflow.compat.v1 as tf

    if Path(f"{place}.index").exists():
        return place
    newest = tf.train.latest_checkpoint(place)
    return None if newest is None else str(newest)


def read_checkpoint(prefix: str) -> dict[str, Array]:
    """The variables of a checkpoint, named as in a graph."""
    import tensorflow.compat.v1 as tf

    reader = tf.train.load_checkpoint(prefix)
    return {f"{name}:0": np.asarray(reader.get_tensor(name)) for name in reader.get_variable_to_shape_map()}


def write_checkpoint(folder: str, values: Mapping[str, Array], step: int) -> str:
    """Write `model-<step>` as the folder's newest checkpoint; like `tf.train.Saver`, keep the last five."""
    import tensorflow.compat.v1 as tf

    place = Path(folder).absolute()
    place.mkdir(parents=True, exist_ok=True)
    with tf.Graph().as_default(), tf.Session() as sess:
        variables = [
            tf.Variable(
                tf.placeholder(value.dtype, value.shape), name=name.partition(":")[0], use_resource=True
            )
            for name, value in values.items()
        ]
        for variable, value in zip(variables, values.values(), strict=True):
            sess.run(variable.initializer, {variable.initializer.inputs[1]: value})
        saver = tf.train.Saver(variables)
        state = tf.train.get_checkpoint_state(str(place))
        older = state.all_model_checkpoint_paths if state is not None else []
        saver.recover_last_checkpoints([path for path in older if path != f"{place}/model-{step}"])
        return str(saver.save(sess, str(place / "model"), global_step=step, write_meta_graph=False))


def _placeholder(column: Column, *, feature: bool) -> Any:
    import tensorflow.compat.v1 as tf

    dtype = "float32" if feature and column.dtype == "float64" else column.dtype
    name = "".join(letter if letter.isalnum() else "_" for letter in column.name)
    role = "features" if feature else "labels"
    return tf.placeholder(tf.as_dtype(dtype), (None, *column.shape), name=f"{role}_{name}")


def _as_argument(tensors: Mapping[str, Any]) -> Any:
    if not tensors:
        return None
    return next(iter(tensors.values())) if len(tensors) == 1 else dict(tensors)


def _called(
    model_fn: Callable[..., Any], features: Any, labels: Any, mode: str, params: Any, config: Any
) -> Any:
    taken = inspect.signature(model_fn).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    given = {"labels": labels, "mode": mode, "params": params, "config": config}
    arguments = {name: value for name, value in given.items() if name in taken or every}
    if labels is not None and "labels" not in arguments:
        raise ConfigError(f"{title(model_fn)} has no argument labels, and the data has labels.")
    return model_fn(features, **arguments)


def _check(spec: Any, model_fn: Any, mode: str) -> None:
    if not hasattr(spec, "predictions") or not hasattr(spec, "loss"):
        raise ConfigError(
            f"{title(model_fn)} must return a kindler.EstimatorSpec; it returned {type(spec).__qualname__}."
        )
    if mode in (ModeKeys.TRAIN, ModeKeys.EVAL) and spec.loss is None:
        raise ConfigError(f"{title(model_fn)} returned no loss for mode {mode!r}.")
    if mode == ModeKeys.PREDICT and spec.predictions is None:
        raise ConfigError(f"{title(model_fn)} returned no predictions for mode {mode!r}.")


def _metric(name: str, predictions: Any, labels: Mapping[str, Any]) -> Any:
    """A metric of the first of the predictions and the first of the labels."""
    import tensorflow.compat.v1 as tf

    known = ("acc", "accuracy", "top5acc", "mae", "mse", "auc", "loss")
    if name not in known:
        raise ConfigError(f"eval_methods: there is no {name!r}; there are {', '.join(known)}.")
    if predictions is None or not labels:
        raise ConfigError(f"eval_methods: {name!r} needs predictions and labels.")
    outputs = next(iter(predictions.values())) if isinstance(predictions, Mapping) else predictions
    targets = next(iter(labels.values()))
    if name in ("mae", "mse"):
        errors = tf.cast(outputs, tf.float32) - tf.reshape(tf.cast(targets, tf.float32), tf.shape(outputs))
        return tf.reduce_mean(tf.abs(errors) if name == "mae" else tf.square(errors))
    if name == "auc":
        flat = tf.reshape(outputs, (-1,))
        return tf.metrics.auc(tf.reshape(targets, (-1,)), flat, num_thresholds=200)
    classes = _classes(targets, outputs)
    if name == "top5acc":
        return tf.reduce_mean(tf.cast(tf.nn.in_top_k(outputs, classes, 5), tf.float32))
    several = outputs.shape.rank is not None and outputs.shape.rank > 1 and outputs.shape[-1] != 1
    chosen = (
        tf.argmax(outputs, -1, output_type=tf.int32)
        if several
        else tf.cast(tf.reshape(outputs, (-1,)) > 0.5, tf.int32)
    )
    return tf.reduce_mean(tf.cast(tf.equal(chosen, classes), tf.float32))


def _classes(targets: Any, outputs: Any) -> Any:
    """Labels as class numbers: given as such, in a column of one, or as one 1 among zeros."""
    import tensorflow.compat.v1 as tf

    if targets.shape.rank == 2 and targets.shape[-1] != 1 and outputs.shape.rank == 2:
        return tf.argmax(targets, -1, output_type=tf.int32)
    return tf.cast(tf.reshape(targets, (-1,)), tf.int32)
