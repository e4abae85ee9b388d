"""Graphs, Keras models, model functions and GANs, trained by two workers of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kindler.compat import tensorflow as tf
from kindler.compat.bigdl.optim.optimizer import (
    SGD,
    Adam,
    MaxEpoch,
    MaxIteration,
    SeveralIteration,
    Step,
    Top1Accuracy,
    TrainSummary,
    ValidationSummary,
)
from kindler.compat.zoo.orca.data import XShards
from kindler.compat.zoo.orca.learn.tf.estimator import Estimator
from kindler.compat.zoo.tfpark import (
    GANEstimator,
    KerasModel,
    TFDataset,
    TFEstimator,
    TFEstimatorSpec,
    TFNet,
    TFOptimizer,
    TFPredictor,
    ZooOptimizer,
)
from kindler.errors import ConfigError
from tests.events import scalars

pytestmark = pytest.mark.timeout(300)


def network(images: Any) -> Any:
    hidden = tf.layers.dense(images, 8, activation=tf.nn.relu, name="hidden")
    return tf.layers.dense(hidden, 2, name="logits")


def loss_of(logits: Any, labels: Any) -> Any:
    return tf.reduce_mean(tf.losses.sparse_softmax_cross_entropy(logits=logits, labels=labels))


def test_from_loss_trains_writes_summaries_and_counts_epochs_through_checkpoints(
    graph: Any, rows: Any, tmp_path: Path
) -> None:
    x, y = rows
    dataset = TFDataset.from_ndarrays((x, y), batch_size=32, val_tensors=(x, y))
    images, labels = dataset.tensors
    logits = network(images)
    method = SGD(0.5, momentum=0.9, leaningrate_schedule=Step(4, 0.1))
    judged = {"val_outputs": [logits], "val_labels": [labels], "val_method": Top1Accuracy()}
    optimizer = TFOptimizer.from_loss(loss_of(logits, labels), method, model_dir=tmp_path / "run", **judged)
    train, validation = TrainSummary(str(tmp_path), "app"), ValidationSummary(str(tmp_path), "app")
    train.set_summary_trigger("Throughput", SeveralIteration(2))
    optimizer.set_train_summary(train).set_val_summary(validation)

    optimizer.optimize(end_trigger=MaxEpoch(2))

    # 3 steps an epoch; the rate falls to a tenth after the fourth one.
    assert train.read_scalar("Loss")[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(train.read_scalar("LearningRate")[:, 1], [0.5] * 4 + [0.05] * 2, rtol=1e-6)
    assert train.read_scalar("Throughput")[:, 0].tolist() == [2, 4, 6]
    assert (train.read_scalar("Throughput")[:, 1] > 0).all()
    assert validation.read_scalar("Top1Accuracy")[:, 0].tolist() == [3, 6]
    assert [step for step, _ in scalars(tmp_path / "app" / "train")["Loss"]] == [1, 2, 3, 4, 5, 6]
    predicted = optimizer.sess.run(logits, {images: x}).argmax(axis=1)
    assert validation.read_scalar("Top1Accuracy")[-1, 1] == pytest.approx(np.mean(predicted == y))
    assert method.state == {"epoch": 3, "neval": 7}

    # The epochs of MaxEpoch are those since the model was new.
    weights = optimizer.sess.run(tf.trainable_variables())
    optimizer.optimize(end_trigger=MaxEpoch(2))
    assert optimizer.estimator.counters == (2, 6)

    with tf.Graph().as_default():  # another program
        fresh = TFDataset.from_ndarrays((x, y), batch_size=32)
        loss = loss_of(network(fresh.tensors[0]), fresh.tensors[1])
        again = TFOptimizer.from_loss(loss, SGD(0.5, momentum=0.9, leaningrate_schedule=Step(4, 0.1)))
        again.load_checkpoint(tmp_path / "run", 6)
        for value, expected in zip(again.sess.run(tf.trainable_variables()), weights, strict=True):
            np.testing.assert_array_equal(value, expected)
        again.optimize(end_trigger=MaxEpoch(2))
        assert again.estimator.counters == (2, 6)
        again.set_train_summary(TrainSummary(str(tmp_path), "again"))
        again.optimize(end_trigger=MaxEpoch(3))
        assert again.estimator.counters == (3, 9)
        rates = TrainSummary(str(tmp_path), "again").read_scalar("LearningRate")
        assert rates[:, 0].tolist() == [7, 8, 9]  # the schedule goes on, too
        np.testing.assert_allclose(rates[:, 1], [0.05, 0.05, 0.005], rtol=1e-6)
        with pytest.raises(ConfigError, match=r"no checkpoint of step 5 .* there are \[3, 6\]"):
            again.load_checkpoint(tmp_path / "run", 5)

    # A plain Saver keeps the trained values, and a predictor gives what the session does.
    tf.train.Saver(tf.trainable_variables()).save(optimizer.sess, str(tmp_path / "saved"))
    with tf.Graph().as_default():
        images, _ = TFDataset.from_ndarrays(x, batch_per_thread=16).tensors
        logits = network(images)
        with tf.Session() as sess:
            tf.train.Saver().restore(sess, str(tmp_path / "saved"))
            found = TFPredictor.from_outputs(sess, [logits]).predict()
            plain = [sess.run(logits, {images: x[i : i + 16]}) for i in range(0, len(x), 16)]
    np.testing.assert_array_equal(np.stack(found), np.concatenate(plain))


def test_optimizers_by_prefix_and_values_for_training_only(graph: Any, rows: Any) -> None:
    x, y = rows
    dataset = TFDataset.from_ndarrays((x, y), batch_size=32)
    images, labels = dataset.tensors
    keep = tf.placeholder(tf.float32, [], "keep")
    loss = loss_of(network(images * keep), labels)
    optimizer = TFOptimizer.from_loss(loss, {"hidden/": Adam(0.1)}, tensor_with_value={keep: (1.0, 0.5)})
    with pytest.warns(UserWarning, match=r"not trained.*logits/"):
        session = optimizer.sess
    before = session.run(tf.trainable_variables())

    optimizer.optimize(MaxIteration(2))

    after = optimizer.sess.run(tf.trainable_variables())
    moved = {
        v.op.name: not np.array_equal(a, b)
        for v, a, b in zip(tf.trainable_variables(), before, after, strict=True)
    }
    assert moved == {"hidden/kernel": True, "hidden/bias": True, "logits/kernel": False, "logits/bias": False}


def test_a_keras_model_of_a_graph_trains_evaluates_and_predicts_as_keras_does(
    rows: Any, tmp_path: Path
) -> None:
    x, y = rows
    tf.keras.backend.clear_session()
    tf.set_random_seed(1)
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [layers.Dense(8, activation="relu", input_shape=(6,)), layers.BatchNormalization(momentum=0.5),
         layers.Dropout(0.1), layers.Dense(2, activation="softmax")]
    )  # fmt: skip
    model.compile(tf.keras.optimizers.RMSprop(0.01), "sparse_categorical_crossentropy", ["accuracy"])
    wrapped = KerasModel(model)
    before = wrapped.evaluate(x, y)

    wrapped.fit(TFDataset.from_ndarrays((x, y), batch_size=32), epochs=8)

    here, there = (
        wrapped.evaluate(x, y),
        wrapped.evaluate(TFDataset.from_ndarrays((x, y), batch_per_thread=8)),
    )
    assert here["loss"] < before["loss"]
    assert there["acc Top1Accuracy"] == pytest.approx(here["acc"])
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-5)
    found = wrapped.predict(TFDataset.from_ndarrays(x, batch_per_thread=8))
    np.testing.assert_allclose(np.stack(found), model.predict(x), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(wrapped.predict(x, distributed=True), model.predict(x), rtol=1e-5, atol=1e-7)
    wrapped.save_weights(str(tmp_path / "model.h5"))
    weights = wrapped.get_weights()
    wrapped.set_weights([np.zeros_like(part) for part in weights])
    wrapped.load_weights(str(tmp_path / "model.h5"))
    np.testing.assert_array_equal(wrapped.get_weights()[0], weights[0])


def test_orca_trains_a_graph_on_tf_data_and_on_shards(graph: Any, rows: Any, tmp_path: Path) -> None:
    x, y = rows
    images = tf.placeholder(tf.float32, (None, 6))
    labels = tf.placeholder(tf.int32, (None,))
    logits = network(images)
    accuracy = tf.reduce_mean(
        tf.cast(tf.equal(tf.argmax(logits, 1, output_type=tf.int32), labels), tf.float32)
    )
    estimator = Estimator.from_graph(
        inputs=images, outputs=logits, labels=labels, loss=loss_of(logits, labels), optimizer=Adam(0.05),
        metrics={"acc": accuracy}, model_dir=tmp_path / "orca",
    )  # fmt: skip
    data = tf.data.Dataset.from_tensor_slices((x, y))

    estimator.fit(data=data, batch_size=32, epochs=2)

    assert estimator.evaluate(data, batch_size=32)["acc"] == pytest.approx(
        np.mean(estimator.sess.run(logits, {images: x}).argmax(axis=1) == y)
    )
    assert estimator._core.counters == (2, 6)
    estimator.fit(data=data, batch_size=32, epochs=2)  # BigDL's optimizers count from when they were new
    assert estimator._core.counters == (2, 6)
    estimator.fit(data=data, batch_size=32, epochs=3)
    assert estimator._core.counters == (3, 9)
    with pytest.raises(ConfigError, match="is batched"):
        estimator.fit(data=data.batch(4))

    shards = XShards.partition({"x": x, "y": y}, num_shards=3)
    estimator.fit(data=shards, batch_size=32, epochs=4)
    scored = np.concatenate([shard["prediction"] for shard in estimator.predict(shards).collect()])
    np.testing.assert_allclose(scored, estimator.sess.run(logits, {images: x}), rtol=1e-5, atol=1e-6)
    again = Estimator.from_graph(inputs=images, outputs=logits, sess=estimator.sess)
    assert again.predict(shards).collect()[0]["prediction"].shape == (32, 2)


def model_fn(features: Any, labels: Any, mode: str) -> TFEstimatorSpec:
    logits = network(features)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return TFEstimatorSpec(mode, predictions=logits)
    return TFEstimatorSpec(mode, predictions=logits, loss=loss_of(logits, labels))


def own_train_op(features: Any, labels: Any, mode: str, params: Any) -> Any:
    logits = network(features)
    predictions = {"logits": logits, "classes": tf.argmax(logits, 1)}
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=predictions)
    loss = loss_of(logits, labels)
    train_op = ZooOptimizer(tf.train.AdamOptimizer(params["lr"])).minimize(loss)
    return tf.estimator.EstimatorSpec(mode, predictions=predictions, loss=loss, train_op=train_op)


def test_both_forms_of_an_estimator_train_on_evaluate_and_predict(rows: Any, tmp_path: Path) -> None:
    x, y = rows

    def input_fn(mode: str) -> TFDataset:
        if mode == tf.estimator.ModeKeys.PREDICT:
            return TFDataset.from_ndarrays(x, batch_per_thread=16)
        return TFDataset.from_ndarrays((x, y), batch_size=32)

    first = TFEstimator(model_fn, tf.train.AdamOptimizer(0.05), model_dir=str(tmp_path / "first"))
    second = TFEstimator.from_model_fn(own_train_op, model_dir=str(tmp_path / "second"), params={"lr": 0.05})
    for estimator in (first, second):
        assert estimator.train(input_fn, steps=4) is estimator
        estimator.train(input_fn, steps=3)
        assert os.path.basename(estimator.latest_checkpoint() or "") == "model-7"
        # A step made in one session, with Adam's slots of the four before it, is not the first of Adam.
        reader = tf.train.load_checkpoint(estimator.latest_checkpoint())
        assert reader.get_tensor("beta1_power") == pytest.approx(0.9**8, rel=1e-5)

    scores = first.evaluate(input_fn, ["acc", "loss", "auc"])
    logits = np.stack(first.predict(input_fn))
    assert scores["acc"] == pytest.approx(np.mean(logits.argmax(axis=1) == y))
    earlier = first.evaluate(input_fn, ["loss"], checkpoint_path=str(tmp_path / "first" / "model-4"))
    assert earlier["loss"] != pytest.approx(scores["loss"])
    named = second.predict(input_fn, predict_keys=["classes"])
    assert set(named[0]) == {"classes"}
    with pytest.raises(ConfigError, match="unknown validation method 'f1'"):
        first.evaluate(input_fn, ["f1"])
    with pytest.raises(ConfigError, match="no optimizer, and model_fn returned no train_op"):
        TFEstimator(model_fn).train(input_fn, steps=1)
    with pytest.raises(ConfigError, match="model_fn's predictions have no"):
        second.predict(input_fn, predict_keys=["probabilities"])


def test_elements_without_a_batch_are_evaluated_and_predicted_but_not_trained(rows: Any) -> None:
    x, y = rows

    def single(features: Any, labels: Any, mode: str) -> TFEstimatorSpec:
        assert features.shape.ndims == 1
        return model_fn(features[None], None if labels is None else labels[None], mode)

    def input_fn(mode: str) -> TFDataset:
        return TFDataset.from_ndarrays(x if mode == tf.estimator.ModeKeys.PREDICT else (x, y))

    estimator = TFEstimator(single, tf.train.AdamOptimizer())

    with pytest.raises(ConfigError, match="batch_size of TFDataset must be specified when used for training"):
        estimator.train(input_fn, steps=1)
    assert np.stack(estimator.predict(input_fn)).shape == (96, 1, 2)
    assert 0 <= estimator.evaluate(input_fn, ["acc"])["acc"] <= 1


def test_a_gan_trains_one_network_at_a_time(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    noise = generator.normal(size=(128, 2)).astype("float32")
    real = generator.normal(3, 0.5, size=(128, 1)).astype("float32")
    cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits

    def judge(data: Any) -> Any:
        return tf.layers.dense(tf.layers.dense(data, 8, activation=tf.nn.relu, name="a"), 1, name="b")

    def discriminator_loss(of_real: Any, of_made: Any) -> Any:
        right = cross_entropy(logits=of_real, labels=tf.ones_like(of_real))
        return tf.reduce_mean(right + cross_entropy(logits=of_made, labels=tf.zeros_like(of_made)))

    gan = GANEstimator(
        lambda noise: tf.layers.dense(noise, 1, name="g"),
        judge,
        lambda of_made: tf.reduce_mean(cross_entropy(logits=of_made, labels=tf.ones_like(of_made))),
        discriminator_loss,
        ZooOptimizer(tf.train.AdamOptimizer(0.05)),
        ZooOptimizer(tf.train.AdamOptimizer(0.05)),
        discriminator_steps=2,
        model_dir=str(tmp_path),
    )
    values = []
    for iterations in (2, 3, 5):
        gan.train(lambda: TFDataset.from_ndarrays((noise, real), batch_size=32), MaxIteration(iterations))
        reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(tmp_path)))
        values.append({name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()})

    def changed(before: Any, after: Any) -> set[str]:
        return {n.split("/")[0] for n in before if "/" in n and not np.array_equal(before[n], after[n])}

    assert [int(value["global_step"]) for value in values] == [2, 3, 5]
    assert changed(values[0], values[1]) == {"Generator"}  # and nothing of the discriminator's optimizer
    assert changed(values[1], values[2]) == {"Discriminator"}


def test_a_frozen_net_gives_its_own_outputs_everywhere(rows: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x, y = rows
    with tf.Graph().as_default(), tf.Session() as sess:
        images = tf.placeholder(tf.float32, [None, 6])
        logits = network(images)
        sess.run(tf.global_variables_initializer())
        expected = sess.run(logits, {images: x})
        gradient = sess.run(tf.gradients(tf.reduce_sum(logits), images)[0], {images: x})
        tf.saved_model.simple_save(sess, str(tmp_path / "model"), {"x": images}, {"y": logits})
        from_session = TFNet.from_session(sess, [images], [logits])
    net = TFNet.from_saved_model(str(tmp_path / "model"))

    np.testing.assert_array_equal(net.forward(x), expected)
    np.testing.assert_array_equal(from_session.forward(x), expected)
    np.testing.assert_allclose(net.predict(x, batch_per_thread=32), expected, rtol=1e-5)
    accuracy = net.evaluate((x, y), 32, ["acc"])["acc"]
    assert accuracy == pytest.approx(np.mean(expected.argmax(axis=1) == y))

    inputs = torch.tensor(x, requires_grad=True)
    outputs = torch.nn.Sequential(net.as_torch(), torch.nn.Identity())(inputs)
    np.testing.assert_array_equal(outputs.detach().numpy(), expected)
    outputs.sum().backward()
    np.testing.assert_allclose(inputs.grad.numpy(), gradient, rtol=1e-5)

    tf.keras.backend.clear_session()
    model = tf.keras.Sequential([tf.keras.layers.Input(shape=(6,)), net.as_keras(tf.keras)])
    np.testing.assert_allclose(model.predict(x), expected, rtol=1e-5)

    with pytest.raises(ConfigError, match="no signature 'other'; it has"):
        TFNet.from_saved_model(str(tmp_path / "model"), signature="other")
    with pytest.raises(ConfigError, match="there is no folder"):
        TFNet.from_saved_model(str(tmp_path / "nothing"))


def test_a_net_scores_a_set_without_a_batch_row_by_row(graph: Any, rows: Any) -> None:
    x, y = rows
    images = tf.placeholder(tf.float32, [None, 6])
    logits = network(images)
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        net = TFNet.from_session(sess, [images], [logits])
        found = TFPredictor(sess, [logits], inputs=[images], dataset=TFDataset.from_ndarrays(x)).predict()
    expected = net.forward(x)
    np.testing.assert_allclose(np.stack(net.predict(TFDataset.from_ndarrays(x))), expected, rtol=1e-5)
    np.testing.assert_allclose(np.stack(found), expected, rtol=1e-5)
    accuracy = net.evaluate(TFDataset.from_ndarrays((x, y)), val_methods=["acc"])["acc"]
    assert accuracy == pytest.approx(np.mean(expected.argmax(axis=1) == y))


def test_the_loss_may_be_among_the_metrics_under_its_own_name(graph: Any, rows: Any) -> None:
    x, y = rows
    images, labels = tf.placeholder(tf.float32, [None, 6]), tf.placeholder(tf.int32, [None])
    logits = network(images)
    parts = {"inputs": images, "labels": labels, "outputs": logits, "loss": loss_of(logits, labels)}
    accuracy = tf.reduce_mean(
        tf.cast(tf.equal(tf.argmax(logits, 1, output_type=tf.int32), labels), tf.float32)
    )
    est = Estimator.from_graph(**parts, optimizer=tf.train.AdamOptimizer(), metrics={"loss": parts["loss"]})
    shards = XShards.partition({"x": x, "y": y}, num_shards=2, engine="local")
    est.fit(shards, epochs=1, batch_size=32, validation_data=shards)
    with pytest.raises(RuntimeError, match="'loss' is the name of the loss"):
        Estimator.from_graph(**parts, metrics={"loss": accuracy})
    logged = est.sess.run(logits, {images: x})
    shares = np.exp(logged) / np.exp(logged).sum(1, keepdims=True)
    assert est.evaluate(shards)["loss"] == pytest.approx(-np.log(shares[np.arange(96), y]).mean(), rel=1e-4)


def test_a_keras_model_of_tensorflow_1_is_trained_on_shards(rows: Any) -> None:
    x, y = rows
    tf.keras.backend.clear_session()
    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Dense(2, activation="softmax", input_shape=(6,))])
    model.compile(optimizer="rmsprop", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    shards = XShards.partition({"x": x, "y": y}, num_shards=2, engine="local")
    est = Estimator.from_keras(model)
    before = model.get_weights()[0]
    est.fit(shards, epochs=1, batch_size=32, validation_data=shards)
    assert not np.array_equal(model.get_weights()[0], before)
    scored = np.concatenate([shard["prediction"] for shard in est.predict(shards).collect()])
    np.testing.assert_allclose(scored, model.predict(x), rtol=1e-4, atol=1e-6)
    assert est.evaluate(shards)["acc"] == pytest.approx(np.mean(scored.argmax(1) == y))
    frames = XShards.from_shards([pd.DataFrame({"image": list(x), "label": y})], engine="local")
    columns = {"feature_cols": ["image"], "label_cols": ["label"]}
    assert est.evaluate(frames, **columns)["acc"] == pytest.approx(np.mean(scored.argmax(1) == y))


def test_arguments_that_would_be_left_out_are_refused(graph: Any, rows: Any) -> None:
    x, y = rows
    dataset = TFDataset.from_ndarrays((x, y), batch_size=32)
    loss = loss_of(network(dataset.tensors[0]), dataset.tensors[1])
    with pytest.raises(ConfigError, match="freeze=True is not supported"):
        TFOptimizer.from_loss(loss, SGD(0.1), freeze=True)
    with pytest.raises(ConfigError, match="batch_outside=True is not supported"):
        TFDataset.from_tf_data_dataset(tf.data.Dataset.from_tensor_slices((x, y)), 32, batch_outside=True)
