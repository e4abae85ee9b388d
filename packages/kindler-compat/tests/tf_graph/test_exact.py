"""Several workers train a graph as a plain session does, and its session has the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from kindler import Checkpoints, Estimator
from kindler.callbacks import Callback
from kindler.compat.bigdl.optim.triggers import SeveralIteration
from tests.tf_graph.graphs import Classifier, plain, rows, values

ROWS, BATCH = 48, 12


def _batches(data: dict[str, np.ndarray], epochs: int = 2) -> list[dict[str, np.ndarray]]:
    starts = [start for _ in range(epochs) for start in range(0, len(data["x"]), BATCH)]
    return [{name: column[start : start + BATCH] for name, column in data.items()} for start in starts]


def _decayed() -> Any:
    step = tf.train.get_or_create_global_step()
    return tf.train.GradientDescentOptimizer(tf.train.exponential_decay(0.5, step, 2, 0.5))


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: tf.train.AdamOptimizer(0.05),
    "momentum": lambda: tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "decayed": _decayed,
}


def _fitted(made: Classifier, optimizer: Any, data: Any, **options: Any) -> Estimator:
    est = Estimator.from_graph(**made.arguments, optimizer=optimizer, workers=2, **options)
    est.fit(data, epochs=2, batch_size=BATCH, shuffle=False, verbose=0)
    return est


def _assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], but: float = 1e-5) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=but, err_msg=name)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("ref", [False, True], ids=["resource-variables", "ref-variables"])
def test_two_workers_end_with_the_variables_of_a_plain_session(name: str, ref: bool) -> None:
    data = rows(ROWS)
    theirs, ours = Classifier(ref=ref), Classifier(ref=ref)
    with theirs.graph.as_default():
        train_op = OPTIMIZERS[name]().minimize(theirs.loss, global_step=tf.train.get_global_step())
    expected = values(plain(theirs, train_op, _batches(data)))
    with ours.graph.as_default():
        est = _fitted(ours, OPTIMIZERS[name](), data)

    # Slots and the global step as well, under the names that the optimizer itself gives them.
    _assert_same(values(est.get_model()), expected)


def _normalised(x: Any) -> Any:
    """BatchNorm in training, with its updates in the graph's collection."""
    mean, variance = tf.nn.moments(x, [0])
    shape = (int(x.shape[1]),)
    with tf.variable_scope("norm"):
        moving_mean = tf.get_variable(
            "moving_mean", shape, initializer=tf.zeros_initializer(), trainable=False
        )
        moving_variance = tf.get_variable(
            "moving_variance", shape, initializer=tf.ones_initializer(), trainable=False
        )
    for moving, value in ((moving_mean, mean), (moving_variance, variance)):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(moving, 0.9 * moving + 0.1 * value))
    return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


def test_updates_run_with_every_step_and_are_those_of_all_workers() -> None:
    # A worker normalises by its own rows. They come in pairs here, of which each worker has one.
    data = {name: np.repeat(column, 2, axis=0) for name, column in rows(ROWS // 2).items()}
    theirs, ours = Classifier(middle=_normalised), Classifier(middle=_normalised)
    updates = theirs.graph.get_collection(tf.GraphKeys.UPDATE_OPS)
    with theirs.graph.as_default(), tf.control_dependencies(updates):
        train_op = tf.train.MomentumOptimizer(0.1, 0.9).minimize(theirs.loss)
    expected = values(plain(theirs, train_op, _batches(data)))
    dataset = tf.data.Dataset.from_tensor_slices((data["x"], data["y"])).batch(BATCH)
    est = _fitted(ours, tf.train.MomentumOptimizer(0.1, 0.9), dataset)

    _assert_same(values(est.get_model()), expected)
    assert expected["norm/moving_mean:0"].any()


def test_a_train_op_tied_to_its_updates_trains_as_it_does_in_a_session() -> None:
    def tied(made: Classifier) -> Any:
        updates = made.graph.get_collection(tf.GraphKeys.UPDATE_OPS)
        with made.graph.as_default(), tf.control_dependencies(updates):
            step = tf.train.get_or_create_global_step()
            return tf.train.MomentumOptimizer(0.1, 0.9).minimize(made.loss, global_step=step)

    data = rows(ROWS)
    theirs, ours = Classifier(middle=_normalised), Classifier(middle=_normalised)
    expected = values(plain(theirs, tied(theirs), _batches(data)))
    est = Estimator.from_graph(**ours.arguments, train_op=tied(ours), workers=1)
    est.fit(data, epochs=2, batch_size=BATCH, shuffle=False, verbose=0)

    _assert_same(values(est.get_model()), expected)
    assert expected["global_step:0"] == 2 * ROWS // BATCH


def test_each_prefix_has_its_own_optimizer_and_one_without_keeps_its_values() -> None:
    data = rows(ROWS)
    theirs, ours = Classifier(), Classifier()
    with theirs.graph.as_default():
        adam = tf.train.AdamOptimizer(0.05)
        train_op = adam.minimize(theirs.loss, var_list=tf.trainable_variables("hidden"))
    expected = values(plain(theirs, train_op, _batches(data)))
    with pytest.warns(UserWarning, match="'out/w', 'out/b'"):
        est = _fitted(ours, {"hidden": tf.train.AdamOptimizer(0.05)}, data)
    _assert_same(values(est.get_model()), expected)

    both = Classifier()
    optimizers = {"hidden": tf.train.AdamOptimizer(0.05), "out": tf.train.GradientDescentOptimizer(0.1)}
    plainly = Classifier()
    with plainly.graph.as_default():
        pairs = tf.train.GradientDescentOptimizer(0.1).compute_gradients(plainly.loss)
        hidden, out = pairs[:2], pairs[2:]
        ops = [
            tf.train.AdamOptimizer(0.05).apply_gradients(hidden),
            tf.train.GradientDescentOptimizer(0.1).apply_gradients(out),
        ]
    expected = values(plain(plainly, ops, _batches(data)))
    _assert_same(values(_fitted(both, optimizers, data).get_model()), expected)


def test_embeddings_change_in_the_rows_that_were_looked_up_only() -> None:
    def build() -> tuple[Any, dict[str, Any]]:
        graph = tf.Graph()
        with graph.as_default():
            ids = tf.placeholder(tf.int64, (None,), name="ids")
            y = tf.placeholder(tf.float32, (None,), name="y")
            table = tf.get_variable("table", initializer=np.ones((10, 2), np.float32), use_resource=True)
            out = tf.reduce_sum(tf.nn.embedding_lookup(table, ids), 1)
            loss = tf.reduce_mean(tf.square(out - y))
        return graph, {"inputs": ids, "labels": y, "outputs": out, "loss": loss}

    data = {"ids": np.array([1, 2, 1, 4] * 6), "y": np.arange(24, dtype=np.float32)}
    # Momentum would move rows for which a gradient was merely zero.
    graph, ends = build()
    with graph.as_default(), tf.Session() as sess:
        train_op = tf.train.MomentumOptimizer(0.05, 0.9).minimize(ends["loss"])
        sess.run(tf.global_variables_initializer())
        for start in (0, 12, 0, 12):
            part = slice(start, start + 12)
            sess.run(train_op, {ends["inputs"]: data["ids"][part], ends["labels"]: data["y"][part]})
        expected = values(sess)
    for workers in (1, 2):
        graph, ends = build()
        est = Estimator.from_graph(**ends, optimizer=tf.train.MomentumOptimizer(0.05, 0.9), workers=workers)
        columns = {"feature_cols": "ids", "label_cols": "y"}
        est.fit(data, epochs=2, batch_size=12, shuffle=False, verbose=0, **columns)
        _assert_same(values(est.get_model()), expected)


class Ends(Callback):
    """Ends a run by an error."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step:
            raise RuntimeError("enough")


@pytest.fixture
def dropped() -> Callable[..., Estimator]:
    """Makes estimators whose graph drops a share of the hidden values that is fed."""

    def make(**options: Any) -> Estimator:
        made = Classifier(
            middle=lambda x: tf.nn.dropout(tf.tanh(x), rate=tf.placeholder(tf.float32, (), "rate"))
        )
        given = {"rate:0": (0.5, 0.0)}
        return Estimator.from_graph(
            **made.arguments, optimizer=tf.train.AdamOptimizer(0.05), tensor_with_value=given, **options
        )

    return make


def test_a_run_goes_on_from_its_checkpoint_bit_by_bit_though_it_draws_random_numbers(
    dropped: Callable[..., Estimator], tmp_path: Path
) -> None:
    data = rows(ROWS)
    options: dict[str, Any] = {"batch_size": BATCH, "verbose": 0}
    whole = dropped(workers=2)
    whole.fit(data, epochs=3, **options)
    first, written = dropped(workers=2), Checkpoints(tmp_path, every=SeveralIteration(3))
    with pytest.raises(RuntimeError, match="enough"):
        first.fit(data, epochs=3, checkpoint=written, callbacks=[Ends(7)], **options)
    second = dropped(workers=2)
    history = second.fit(data, epochs=3, checkpoint=tmp_path, resume=True, **options)

    assert [row["epoch"] for row in history] == [1, 2, 3]
    _assert_same(values(second.get_model()), values(whole.get_model()), but=0)


def test_values_for_training_are_not_those_for_judging(dropped: Callable[..., Estimator]) -> None:
    data = rows(ROWS)
    est = dropped(workers=1)
    sess = est.get_model()
    figures = est.evaluate(data, verbose=0)
    feed = {"x:0": data["x"], "y:0": data["y"], "rate:0": 0.0}

    assert figures["loss"] == pytest.approx(sess.run(est._model.spec.ends.loss, feed), rel=1e-5)
