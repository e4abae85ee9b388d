"""What cannot work is said on the driver, before any worker starts."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from kindler import Estimator
from kindler.compat.frameworks.tf_graph.replica import GraphReplica
from kindler.errors import ConfigError, DataError
from tests.tf_graph.graphs import Classifier, rows


def _adam(made: Classifier, **changed: Any) -> Estimator:
    return Estimator.from_graph(**{**made.arguments, "optimizer": "adam", **changed})


def test_a_placeholder_that_nobody_feeds_is_named() -> None:
    made = Classifier(middle=lambda x: tf.nn.dropout(x, rate=tf.placeholder(tf.float32, (), "rate")))

    with pytest.raises(ConfigError, match=r"'rate:0', which is not fed"):
        _adam(made)


def test_a_learning_rate_that_nobody_feeds_is_named() -> None:
    made = Classifier()
    with made.graph.as_default():
        optimizer = tf.train.AdamOptimizer(tf.placeholder(tf.float32, (), "lr"))

    with pytest.raises(ConfigError, match=r"the optimizer .* 'lr:0', which is not fed"):
        _adam(made, optimizer=optimizer)


def test_a_loss_that_no_row_reaches_is_refused() -> None:
    made = Classifier()
    with made.graph.as_default():
        loss = tf.reduce_sum(tf.square(made.graph.get_collection("trainable_variables")[0]))

    with pytest.raises(ConfigError, match="does not depend on any of the inputs and labels"):
        _adam(made, loss=loss, metrics=None)


def test_a_graph_without_variables_is_refused() -> None:
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, (None, 2))
        loss = tf.reduce_mean(x)

    with pytest.raises(ConfigError, match="depends on no trainable variable"):
        Estimator.from_graph(inputs=x, loss=loss, optimizer="sgd")


def test_a_loss_for_each_row_is_refused() -> None:
    made = Classifier()
    with made.graph.as_default():
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=made.y, logits=made.logits)

    with pytest.raises(ConfigError, match=r"loss must be a scalar.*\n?.*reduce_mean"):
        _adam(made, loss=loss)


def test_an_output_that_needs_labels_is_refused() -> None:
    made = Classifier()

    with pytest.raises(ConfigError, match=r"depends on the labels \(y\)"):
        _adam(made, outputs=made.accuracy)


def test_python_code_in_a_graph_is_refused() -> None:
    made = Classifier(middle=lambda x: tf.ensure_shape(tf.py_func(np.tanh, [x], tf.float32), x.shape))
    est = Estimator.from_graph(inputs=made.x, outputs=made.logits)

    with pytest.raises(ConfigError, match="calls Python code"):
        est.predict({"x": rows(4)["x"]}, verbose=0)


def test_a_number_of_rows_that_is_fixed_is_refused() -> None:
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, (8, 2), name="fixed")

    with pytest.raises(ConfigError, match="fixes the number of rows to 8"):
        Estimator.from_graph(inputs=x, outputs=x)


def test_eager_tensors_are_refused() -> None:
    with tf.init_scope():
        eager = tf.constant([1.0])

    with pytest.raises(ConfigError, match="tensors of a TensorFlow graph; received"):
        Estimator.from_graph(inputs=eager, outputs=eager)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"optimizer": "adma"}, "must be one of adadelta, adagrad, adam"),
        ({"optimizer": 3}, "must be a tf.compat.v1.train.Optimizer; received int"),
        ({"optimizer": {"nothing": "adam"}}, "no variable's name begins with 'nothing'"),
        ({"clip_norm": 0}, "clip_norm must be a positive number"),
        ({"clip_value": (1.0, -1.0)}, r"clip_value must be a positive number, or a pair"),
        ({"loss": None}, "an optimizer needs a loss"),
        ({"metrics": {"loss": None}}, "'loss' is already a name among the results"),
    ],
)
def test_wrong_arguments_are_named(changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        _adam(Classifier(), **changed)


def test_a_step_that_nobody_counts_is_warned_of() -> None:
    made = Classifier()
    with made.graph.as_default():
        step = tf.Variable(0, trainable=False, name="my_step", dtype=tf.int64)
        rate = tf.train.exponential_decay(0.1, step, 2, 0.5)

    with pytest.warns(UserWarning, match="'my_step', which training does not change"):
        _adam(made, optimizer=tf.train.AdamOptimizer(rate))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        _adam(made, optimizer=tf.train.AdamOptimizer(rate), global_step=step)


def test_a_dataset_of_rows_is_refused() -> None:
    data = rows(8)
    dataset = tf.data.Dataset.from_tensor_slices((data["x"], data["y"]))
    est = _adam(Classifier())

    for call in (est.fit, est.evaluate):
        with pytest.raises(ConfigError, match="are rows, not batches of them"):
            call(dataset, verbose=0)


def test_a_session_without_values_says_which() -> None:
    made = Classifier()
    est = _adam(made, sess=tf.Session(graph=made.graph))

    with pytest.raises(ConfigError, match="no value for hidden/w:0"):
        est.fit(rows(8), verbose=0)


def test_a_session_of_another_graph_is_refused() -> None:
    with pytest.raises(ConfigError, match="a different graph than the inputs"):
        _adam(Classifier(), sess=tf.Session(graph=tf.Graph()))


def test_a_closed_session_says_so() -> None:
    est = _adam(Classifier())
    est.get_model().close()

    with pytest.raises(ConfigError, match="session of this graph is closed"):
        est.fit(rows(8), verbose=0)


def test_values_that_a_placeholder_does_not_have_are_an_error_with_column_and_row() -> None:
    replica = GraphReplica(_adam(Classifier())._model.spec, feature_names=("x",), label_names=("y",))
    x = rows(3)["x"]

    with pytest.raises(DataError, match=r"column 'y', row 1: is 0.5, which int32 cannot represent"):
        replica._labels.arrays([np.array([1.0, 0.5, 2.0])])
    with pytest.raises(DataError, match=r"column 'y', row 0: is 4294967296"):
        replica._labels.arrays([np.array([1 << 32])])
    with pytest.raises(DataError, match=r"column 'x': has rows of the shape \(2, 2\).*takes \(4,\)"):
        replica._features.arrays([x.reshape(-1, 2, 2)])
    [labels] = replica._labels.arrays([np.array([[1.0], [2.0]])])
    assert (labels.shape, labels.dtype) == ((2,), np.int32)
