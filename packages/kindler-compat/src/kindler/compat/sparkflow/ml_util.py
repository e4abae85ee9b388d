"""SparkFlow's helpers for weights, features and batches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kindler.compat.sparkflow.graphs import OpenGraph, tf
from kindler.errors import ConfigError

Array = np.ndarray[Any, Any]


def tensorflow_get_weights(vs: Sequence[Any] | None = None) -> list[Array]:
    """The values of variables in the default session; without any, of all trainable ones."""
    variables = list(vs or tf.trainable_variables())
    values: list[Array] = _session().run(variables)
    return values


def tensorflow_set_weights(weights: Sequence[Array], vs: Sequence[Any] | None = None) -> None:
    """Give variables of the default session these values. The graph does not grow by it."""
    variables = list(vs or tf.trainable_variables())
    if len(variables) != len(weights):
        raise ConfigError(f"received {len(weights)} weights for {len(variables)} variables.")
    for variable, value in zip(variables, weights, strict=True):
        _session().run(variable.initializer, feed_dict={variable.initializer.inputs[1]: value})


def convert_weights_to_json(weights: Iterable[Array]) -> str:
    return json.dumps([np.asarray(weight).tolist() for weight in weights])


def convert_json_to_weights(json_weights: str) -> list[Array]:
    return [np.asarray(weight) for weight in json.loads(json_weights)]


def calculate_weights(collected_weights: Sequence[Sequence[Array]]) -> list[Array]:
    return [np.mean(np.stack(parts), axis=0) for parts in zip(*collected_weights, strict=True)]


def handle_data(data: Any, inp_col: str, label_col: str | None) -> Any:
    features = _dense(data[inp_col])
    return features if label_col is None else (features, data[label_col])


def handle_features(data: Iterable[Any], is_supervised: bool = False) -> tuple[Array, Array | None]:
    """Rows as an array of features, and one of labels: a number is a row of one."""
    rows = list(data)
    if not is_supervised:
        return np.asarray([_dense(row) for row in rows]), None
    labels = [[label] if isinstance(label, int | float | np.number) else _dense(label) for _, label in rows]
    return np.asarray([_dense(features) for features, _ in rows]), np.asarray(labels)


def handle_feed_dict(
    train: Array,
    tfInput: Any,
    tfLabel: Any = None,
    labels: Array | None = None,
    mini_batch_size: int = -1,
    idx: int | None = None,
) -> dict[Any, Array]:
    """What a batch feeds: all rows, the rows from `idx` on, or rows at random; never more than there are."""
    if mini_batch_size < 1 or mini_batch_size >= len(train):
        chosen: Any = slice(None)
    elif idx is not None:
        chosen = slice(idx, idx + mini_batch_size)
    else:
        chosen = np.random.choice(len(train), mini_batch_size, replace=False)
    fed = {tfInput: train[chosen]}
    if tfLabel is not None and labels is not None:
        fed[tfLabel] = labels[chosen]
    return fed


def handle_shuffle(features: Array, labels: Array | None) -> tuple[Array, Array | None]:
    order = np.random.permutation(len(features))
    return features[order], None if labels is None else labels[order]


def predict_func(
    rows: Iterable[Any],
    graph_json: str,
    prediction: str,
    graph_weights: str,
    inp: str,
    activation: str,
    tf_input: str,
    tf_dropout: str | None = None,
    to_keep_dropout: bool = False,
) -> list[Any]:
    """Rows of Spark with a prediction each: a float, or a vector.

    `SparkAsyncDLModel.transform` does this in batches and without going through rows; `prediction` is the new
    column, `inp` that of features, `activation` the tensor that is evaluated.
    """
    from pyspark.ml.linalg import Vectors
    from pyspark.sql import Row

    given = [row.asDict() for row in rows]
    if not given:
        return []
    opened = OpenGraph.of(graph_json)
    opened.assign_trained(convert_json_to_weights(graph_weights))
    fed: dict[Any, Any] = {opened.tensor(tf_input, "tfInput"): np.stack([_dense(row[inp]) for row in given])}
    if tf_dropout is not None:
        fed[opened.tensor(tf_dropout, "tfDropout")] = 1.0 if to_keep_dropout else 0.0
    outputs = np.asarray(opened.sess.run(opened.tensor(activation, "tfOutput"), feed_dict=fed))
    flat = outputs.reshape(len(given), -1)
    return [
        Row(**{**row, prediction: float(out[0]) if len(out) == 1 else Vectors.dense(out)})
        for row, out in zip(given, flat, strict=True)
    ]


def _dense(value: Any) -> Array:
    return np.asarray(value.toArray() if hasattr(value, "toArray") else value)


def _session() -> Any:
    session = tf.get_default_session()
    if session is None:
        raise ConfigError("there is no default session.\nHint: with tf.Session() as sess: ...")
    return session
