"""TFPark's KerasModel with models that execute eagerly; those of graphs are in tests/tfpark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flavour import FLAVOUR

if FLAVOUR != "tf_keras":
    pytest.skip("KerasModel is for Keras 2", allow_module_level=True)
pytest.importorskip("tensorboard")

from kindler.compat.bigdl.optim.optimizer import SGD, Adam, MaxEpoch, Step, TrainSummary
from kindler.compat.zoo.tfpark import KerasModel, TFDataset, TFNet, TFOptimizer
from kindler.errors import ConfigError


def test_an_eager_model_trains_evaluates_and_predicts_as_keras_does(keras: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(0).uniform(size=(64, 6)).astype("float32")
    y = (x.sum(axis=1) > 3).astype("int32")
    model = keras.Sequential([keras.layers.Dense(2, activation="softmax", input_shape=(6,))])
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    wrapped = KerasModel(model, optimizer=Adam(0.05))
    before = wrapped.evaluate(x, y)

    wrapped.fit(TFDataset.from_ndarrays((x, y), batch_size=32), epochs=2)

    here, there = (
        wrapped.evaluate(x, y),
        wrapped.evaluate(TFDataset.from_ndarrays((x, y), batch_per_thread=8)),
    )
    assert here["loss"] < before["loss"]
    assert there["acc Top1Accuracy"] == pytest.approx(here["acc"])
    np.testing.assert_allclose(wrapped.predict(x, distributed=True), model.predict(x, verbose=0), rtol=1e-5)
    optimizer = TFOptimizer.from_keras(model, TFDataset.from_ndarrays((x, y), batch_size=32))
    optimizer.set_train_summary(TrainSummary(str(tmp_path), "keras")).optimize(MaxEpoch(1))
    assert len(TrainSummary(str(tmp_path), "keras").read_scalar("Loss")) == 2
    with pytest.raises(ConfigError, match="learning-rate schedule, which is applied in TensorFlow 1 graphs"):
        _ = KerasModel(model, optimizer=SGD(0.1, leaningrate_schedule=Step(1, 0.5))).estimator
    with pytest.raises(ConfigError, match="has no session"):
        _ = optimizer.sess


def test_a_saved_model_of_tensorflow_2_is_a_layer_of_another_model(keras: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(0).uniform(size=(8, 6)).astype("float32")
    layers = [
        keras.layers.Dense(4, input_shape=(6,)),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(3),
    ]
    model = keras.Sequential(layers)
    model.save(str(tmp_path / "model"), save_format="tf")

    net = TFNet.from_saved_model(str(tmp_path / "model"))

    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose(net.forward(x), expected, rtol=1e-5)
    whole = keras.Sequential([keras.layers.Input((6,)), net.as_keras(keras), keras.layers.ReLU()])
    np.testing.assert_allclose(whole.predict(x, verbose=0), np.maximum(expected, 0), rtol=1e-5)
    assert whole.count_params() == 0
