"""An estimator of a graph: every kind of data, both engines, files, and the user's own session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tensorflow.compat.v1 as tf

from kindler import Estimator, XShards
from kindler.callbacks import Callback, TensorBoard
from tests.tf_graph.graphs import CLASSES, WIDTH, Classifier, rows, values
from tests.whole import whole_only

DATA = rows(40)


def _estimator(made: Classifier, **options: Any) -> Estimator:
    optimizer = tf.train.MomentumOptimizer(0.1, 0.9)
    return Estimator.from_graph(**{**made.arguments, "optimizer": optimizer, "workers": 2, **options})


def _creator(config: Any, batch_size: int) -> Any:
    import tensorflow

    return tensorflow.data.Dataset.from_tensor_slices((DATA["x"], DATA["y"])).batch(batch_size)


def test_every_kind_of_data_trains_judges_and_scores_the_same_model() -> None:
    made = Classifier()
    est = _estimator(made)
    frame = pd.DataFrame({"x": list(DATA["x"]), "y": DATA["y"].astype(np.float64)})
    shards = XShards.partition({"x": DATA["x"], "y": DATA["y"]}, 2)
    dataset = tf.data.Dataset.from_tensor_slices((DATA["x"], DATA["y"])).batch(20)
    whole = {"feature_cols": "x", "label_cols": "y", "verbose": 0}

    history = est.fit(shards, epochs=2, batch_size=20, verbose=0, validation_data=DATA)
    assert [row["num_samples"] for row in history] == [40, 40]
    assert {"loss", "acc", "val_loss", "val_acc"} <= set(history[0])
    assert est.fit(dataset, epochs=1, verbose=0)[0]["epoch"] == 3
    assert est.fit(_creator, epochs=1, batch_size=20, verbose=0)[0]["num_samples"] == 40
    sess = est.get_model()
    fed = {made.x: DATA["x"], made.y: DATA["y"]}
    expected = {"loss": sess.run(made.loss, fed), "acc": sess.run(made.accuracy, fed), "num_samples": 40}
    assert est.evaluate(frame, **whole) == pytest.approx(expected, rel=1e-5)

    logits = sess.run(made.logits, fed)
    by_frame = est.predict(frame, feature_cols="x", verbose=0)["prediction"]
    np.testing.assert_array_equal(np.stack(by_frame), logits)
    scored = est.predict(shards, verbose=0).collect()
    np.testing.assert_allclose(np.concatenate([part["prediction"] for part in scored]), logits, atol=1e-6)
    np.testing.assert_array_equal(est.predict(DATA["x"], verbose=0), logits)


class Watched(Callback):
    """Looks at what a callback may look at."""

    def on_epoch_end(self, run: Any, logs: Any) -> None:
        assert run.model.graph.get_tensor_by_name("x:0") is not None


def test_values_of_the_session_count_and_the_trained_ones_are_put_there(tmp_path: Path) -> None:
    made = Classifier()
    with made.graph.as_default():
        saver = tf.train.Saver()
        [bias] = [v for v in tf.global_variables() if v.name == "out/b:0"]
        set_to = {number: tf.assign(bias, tf.fill([CLASSES], number)) for number in (3.0, 5.0)}
        sess = tf.Session()
        sess.run(tf.global_variables_initializer())
    sess.run(set_to[3.0])
    still = tf.train.GradientDescentOptimizer(0.0)
    est, logs = _estimator(made, sess=sess, workers=1, optimizer=still), TensorBoard(tmp_path / "logs")
    est.fit(DATA, verbose=0, callbacks=[Watched(), logs])
    np.testing.assert_array_equal(values(sess)["out/b:0"], np.full(CLASSES, 3.0))
    assert est.get_model() is sess
    # Between two fits, too: whatever the user restores there is what training goes on from.
    sess.run(set_to[5.0])
    est.fit(DATA, verbose=0, callbacks=[logs])
    np.testing.assert_array_equal(values(sess)["out/b:0"], np.full(CLASSES, 5.0))
    assert est.get_train_summary("LearningRate")[:, :2].tolist() == [[n, 0.0] for n in (1, 2, 3, 4)]

    with made.graph.as_default():
        prefix = saver.save(sess, str(tmp_path / "plain"))
    again = Classifier()
    other = _estimator(again, workers=1, optimizer=None).load_weights(prefix)
    np.testing.assert_array_equal(other.predict(DATA["x"], verbose=0), est.predict(DATA["x"], verbose=0))


def test_a_saved_graph_is_a_saved_model_and_an_estimator_again(tmp_path: Path) -> None:
    made = Classifier()
    est = _estimator(made, workers=1)
    est.fit(DATA, epochs=1, verbose=0)
    logits = est.predict(DATA["x"], verbose=0)
    est.save(tmp_path / "model")
    est.save(tmp_path / "whole.estimator")

    import tensorflow

    served = tensorflow.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    [output] = served(x=tensorflow.constant(DATA["x"])).values()
    np.testing.assert_allclose(output, logits, atol=1e-6)
    fresh = _estimator(Classifier(), workers=1).load_weights(tmp_path / "model")
    np.testing.assert_array_equal(fresh.predict(DATA["x"], verbose=0), logits)
    read = Estimator.load(tmp_path / "whole.estimator", trusted=True)
    for estimator in (est, read):  # the optimizer's slots are in it
        estimator.fit(DATA, epochs=1, verbose=0)
    np.testing.assert_array_equal(read.predict(DATA["x"], verbose=0), est.predict(DATA["x"], verbose=0))


def test_inputs_and_outputs_by_name_and_a_loss_without_labels() -> None:
    with tf.Graph().as_default():
        a = tf.placeholder(tf.float32, (None, WIDTH), name="a")
        b = tf.placeholder(tf.float32, (None,), name="b")
        w = tf.get_variable("w", initializer=np.zeros((WIDTH, 1), np.float32))
        code = tf.matmul(a, w)[:, 0] + b
        loss = tf.reduce_mean(tf.square(code - 1.0))
        twice = 2 * b
    est = Estimator.from_graph(
        inputs={"b": b, "a": a}, outputs={"code": code, "twice": twice}, loss=loss, optimizer="sgd", workers=1
    )
    data = {"a": DATA["x"], "b": np.arange(40)}
    est.fit(data, feature_cols=["a", "b"], verbose=0)
    scored = est.predict(data, feature_cols=["a", "b"], verbose=0)

    np.testing.assert_array_equal(scored["twice"], 2 * np.arange(40))
    assert est.get_model().run(w).any()


@whole_only  # 20 CPU seconds; the engines and sources do not know the framework
def test_a_spark_frame_trains_on_spark_and_keeps_its_columns() -> None:
    import kindler

    spark = kindler.init(cores=2)
    try:
        made = Classifier()
        est = _estimator(made)
        columns = [(n, x.tolist(), int(y)) for n, (x, y) in enumerate(zip(DATA["x"], DATA["y"], strict=True))]
        frame = spark.createDataFrame(columns, "id long, x array<float>, y long")
        history = est.fit(frame, epochs=1, batch_size=20, feature_cols="x", label_cols="y", verbose=0)
        assert history[0]["num_samples"] == 40
        scored = est.predict(frame, feature_cols="x").orderBy("id").collect()
        logits = est.get_model().run(made.logits, {made.x: DATA["x"]})
        np.testing.assert_allclose([row["prediction"] for row in scored], logits, atol=1e-5)
        assert [row["id"] for row in scored] == list(range(40))
    finally:
        kindler.stop()
