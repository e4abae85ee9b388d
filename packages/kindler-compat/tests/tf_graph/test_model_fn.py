"""Model functions: one set of values through training, judging and predicting, and through checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from kindler import Estimator
from kindler.compat.estimators import EstimatorSpec, InputData, ModeKeys
from kindler.errors import ConfigError, NotFittedError
from tests.tf_graph.graphs import CLASSES, WIDTH, rows

DATA = rows(48)


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    first = np.random.default_rng(0).normal(size=(WIDTH, CLASSES)).astype(np.float32)
    w = tf.get_variable("w", initializer=first)
    logits = tf.matmul(features, w)
    predictions = {"class": tf.argmax(logits, 1), "logits": logits}
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions=predictions)
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    metrics = {"streamed": tf.metrics.accuracy(labels, predictions["class"])}
    optimizer = tf.train.GradientDescentOptimizer(params["lr"])
    train_op = optimizer.minimize(loss, tf.train.get_global_step()) if params["own"] else None
    return EstimatorSpec(mode, logits, loss, train_op, metrics)


def input_fn(mode: str) -> Any:
    if mode == ModeKeys.PREDICT:
        return {"x": DATA["x"]}
    return InputData(data=DATA, batch_size=12)


def _trained(values: np.ndarray, rate: float, steps: int) -> np.ndarray:
    """What plain gradient descent makes of the weights, in numpy."""
    w = values.astype(np.float64)
    for step in range(steps):
        part = slice(12 * (step % 4), 12 * (step % 4) + 12)
        x, y = DATA["x"][part].astype(np.float64), DATA["y"][part]
        shares = np.exp(x @ w)
        shares /= shares.sum(1, keepdims=True)
        shares[np.arange(12), y] -= 1
        w -= rate * x.T @ shares / 12
    return w


def test_training_goes_on_from_the_newest_checkpoint_and_counts_its_steps(tmp_path: Path) -> None:
    params = {"lr": 0.3, "own": True}
    options = {"model_dir": tmp_path / "m", "params": params, "workers": 2}
    est = Estimator.from_model_fn(model_fn, **options)
    est.train(input_fn, steps=6, shuffle=False, verbose=0)
    assert est.global_step == 6
    first = np.random.default_rng(0).normal(size=(WIDTH, CLASSES)).astype(np.float32)
    w = _trained(first, 0.3, 6)

    # Another process would see the same: all that it needs is in the folder.
    other = Estimator.from_model_fn(model_fn, **options)
    figures = other.evaluate(input_fn, ["acc"], verbose=0)
    right = float(((DATA["x"] @ w).argmax(1) == DATA["y"]).mean())
    assert figures["acc"] == pytest.approx(right)
    assert figures["streamed"] == pytest.approx(right)
    assert (figures["num_samples"], figures["global_step"]) == (48, 6)
    scored = other.predict(input_fn, ["logits"], verbose=0)
    np.testing.assert_allclose(scored["logits"], DATA["x"] @ w, atol=1e-4)
    assert "class" not in scored

    other.train(input_fn, steps=4, shuffle=False, verbose=0)
    assert other.global_step == 10
    assert tf.train.latest_checkpoint(str(tmp_path / "m")).endswith("model-10")
    earlier = other.evaluate(input_fn, checkpoint_path=tmp_path / "m" / "model-6", verbose=0)
    assert (earlier["global_step"], earlier["loss"]) == (6, pytest.approx(figures["loss"]))
    np.testing.assert_allclose(
        tf.train.load_variable(str(tmp_path / "m"), "w"), _trained(w, 0.3, 4), atol=1e-5
    )


def test_an_optimizer_of_the_estimator_and_values_in_memory_and_a_warm_start(tmp_path: Path) -> None:
    params = {"lr": 0.0, "own": False}
    est = Estimator.from_model_fn(model_fn, tf.train.GradientDescentOptimizer(0.3), params=params, workers=1)
    with pytest.raises(NotFittedError, match="call it first"):
        est.predict(input_fn)
    est.train(input_fn, 4, shuffle=False, verbose=0)
    first = np.random.default_rng(0).normal(size=(WIDTH, CLASSES)).astype(np.float32)
    w = _trained(first, 0.3, 4)
    np.testing.assert_allclose(est.predict(input_fn, "logits", verbose=0)["logits"], DATA["x"] @ w, atol=1e-4)

    with tf.Graph().as_default(), tf.Session() as sess:
        tf.get_variable("w", initializer=w.astype(np.float32))
        sess.run(tf.global_variables_initializer())
        prefix = tf.train.Saver().save(sess, str(tmp_path / "given"))
    still = tf.train.GradientDescentOptimizer(0.0)
    warm = Estimator.from_model_fn(model_fn, still, params=params, warm_start_from=prefix, workers=1)
    warm.train(input_fn, 1, verbose=0)
    np.testing.assert_allclose(
        warm.predict(input_fn, "logits", verbose=0)["logits"], DATA["x"] @ w, atol=1e-4
    )


def layered_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    logits = tf.layers.dense(features, CLASSES, kernel_initializer=tf.zeros_initializer())
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions={"logits": logits})
    return EstimatorSpec(mode, logits, tf.losses.sparse_softmax_cross_entropy(labels, logits))


@pytest.mark.filterwarnings("ignore:.*tf.layers.dense.*:UserWarning")
def test_layers_of_tensorflow_1_are_there_though_keras_3_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kindler.compat.zoo import tfpark

    est = Estimator.from_model_fn(layered_fn, tf.train.GradientDescentOptimizer(0.3), workers=1)
    est.train(input_fn, 2, shuffle=False, verbose=0)
    scored = est.predict(input_fn, "logits", verbose=0)["logits"]
    # With a bias, which is a weight of a column of ones.
    ones = {**DATA, "x": np.column_stack([DATA["x"], np.ones(len(DATA["x"]))])}
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "DATA", ones)
        w = _trained(np.zeros((WIDTH + 1, CLASSES)), 0.3, 2)
    np.testing.assert_allclose(scored, ones["x"] @ w, atol=1e-4)

    monkeypatch.setattr(tf, "layers", ModuleType("what Keras 3 has for it"))
    assert tfpark.TFDataset is not None  # programs of TFPark use layers before anything of Kindler runs
    assert tf.layers.dense is not None


def test_what_a_model_function_lacks_is_said() -> None:
    est = Estimator.from_model_fn(model_fn, params={"lr": 0.1, "own": False})
    with pytest.raises(ConfigError, match="there is no optimizer"):
        est.train(input_fn)
    with pytest.raises(ConfigError, match="must return an EstimatorSpec; it returned NoneType"):
        Estimator.from_model_fn(lambda features, labels, mode: None, "sgd").train(input_fn)
    with pytest.raises(ConfigError, match="eval_methods: there is no 'akk'"):
        est.evaluate(input_fn, ["akk"])
    rows_only = tf.data.Dataset.from_tensor_slices((DATA["x"], DATA["y"]))
    with pytest.raises(ConfigError, match=r"its elements are rows, not batches"):
        est.train(lambda: rows_only)


def test_tf_estimator_is_there_again_and_trains_a_model_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow

    import kindler.compat.tensorflow_estimator  # noqa: F401

    estimator = tensorflow.estimator
    config = estimator.RunConfig(model_dir=str(tmp_path / "m"), save_checkpoints_steps=2)
    est = estimator.Estimator(model_fn, config=config, params={"lr": 0.3, "own": True})
    batches = tf.data.Dataset.from_tensor_slices((DATA["x"], DATA["y"])).batch(12)
    endless = batches.repeat()
    train, judge = estimator.TrainSpec(lambda: endless, 4), estimator.EvalSpec(lambda: endless, 4)
    for _ in range(2):  # the second time, four steps are made already
        metrics, exports = estimator.train_and_evaluate(est, train, judge)

    first = np.random.default_rng(0).normal(size=(WIDTH, CLASSES)).astype(np.float32)
    w = _trained(first, 0.3, 4)
    right = (DATA["x"] @ w).argmax(1)
    assert metrics["streamed"] == pytest.approx((right == DATA["y"]).mean())
    assert (metrics["global_step"], exports) == (4, [])
    rows_of_x = tf.data.Dataset.from_tensor_slices(DATA["x"]).batch(12)
    assert [row["class"] for row in est.predict(lambda: rows_of_x, ["class"])] == right.tolist()

    assert issubclass(estimator.LoggingTensorHook, estimator.SessionRunHook)
    assert est.train(lambda: batches, steps=6)._core.global_step == 8  # its data has an end
    with pytest.raises(ConfigError, match=r"steps=1 counts batches of a tf.data.Dataset.*'InputData'"):
        est.train(lambda: input_fn("train"), steps=1)
    with pytest.raises(ConfigError, match="hooks are not called here"):
        est.train(input_fn, hooks=[estimator.StopAtStepHook(1)])
    with pytest.raises(AttributeError, match="tf.estimator has no DNNClassifier here"):
        estimator.DNNClassifier  # noqa: B018
    with pytest.raises(ConfigError, match="strategies of tf.distribute"):
        estimator.RunConfig(train_distribute=object())
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}}')
    with pytest.raises(ConfigError, match="each of its 2 nodes would train a separate model"):
        estimator.Estimator(model_fn)
