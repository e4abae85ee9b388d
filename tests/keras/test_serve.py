"""Keras models behind the server's one face: the numbers of `predict`, for any number of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flavour
import numpy as np
import pytest

from kindler import Estimator, Store
from kindler.errors import ConfigError
from kindler.models.loaded import load, wrap

X = np.random.default_rng(0).random((5, 4), np.float32)


def test_a_stored_model_gives_the_numbers_of_predict(tmp_path: Path, keras: Any) -> None:
    inputs = keras.layers.Input((4,), name="x")
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(3, activation="relu")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(2, activation="softmax", name="y")(hidden))
    om = Store(tmp_path / "store")
    version = om.models.put(model, "net")

    served = load(om.store, version, trusted=False).predictor

    assert [(s.name, s.dtype, s.shape) for s in served.signature.inputs] == [("x", "float32", (None, 4))]
    for rows in (1, 3, 5):
        (name, outputs), *_ = served.call({"x": X[:rows]}, "predict").items()
        assert name == "y"
        np.testing.assert_allclose(outputs, model.predict(X[:rows], verbose=0), rtol=1e-5, atol=1e-6)


def test_a_model_computes_on_the_cpu_unless_a_gpu_was_insisted_on(tmp_path: Path, keras: Any) -> None:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    om = Store(tmp_path / "store")
    version = om.models.put(model, "net")

    loaded = load(om.store, version, trusted=False, device="auto")

    assert (loaded.kind.device, loaded.kind.device_bytes(version.meta)) == ("cpu", 0)
    np.testing.assert_allclose(loaded.predictor(X), model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="'cuda' was requested"):
        load(om.store, version, trusted=False, device="cuda")
    om.close()


def test_several_inputs_and_outputs_keep_their_names(keras: Any) -> None:
    a, b = keras.layers.Input((2,), name="a"), keras.layers.Input((2,), name="b")
    total = keras.layers.Add(name="total")([a, b])
    model = keras.Model([a, b], [total, keras.layers.Multiply(name="product")([a, b])])

    served = wrap(model).predictor
    outputs = served.call({"b": X[:, 2:], "a": X[:, :2]}, "predict")

    assert [spec.name for spec in served.signature.outputs] == ["total", "product"]
    np.testing.assert_allclose(outputs["total"], X[:, :2] + X[:, 2:], rtol=1e-6)
    np.testing.assert_allclose(outputs["product"], X[:, :2] * X[:, 2:], rtol=1e-6)


def test_inputs_of_one_shape_are_not_mistaken_for_each_other(keras: Any) -> None:
    a, b = keras.layers.Input((2,), name="a"), keras.layers.Input((2,), name="b")
    model = keras.Model([a, b], keras.layers.Dense(2)(keras.layers.Subtract()([a, b])))

    (outputs,) = wrap(model).predictor.call({"a": X[:, :2], "b": X[:, 2:]}, "predict").values()

    np.testing.assert_allclose(outputs, model.predict([X[:, :2], X[:, 2:]], verbose=0), rtol=1e-5, atol=1e-6)


def test_a_recurrent_model_gives_the_numbers_of_predict(keras: Any) -> None:
    layers = [keras.layers.Input((4, 1)), keras.layers.GRU(3, unroll=False), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    served = wrap(model).predictor
    rows = X[:, :, None]

    (outputs,) = served.call({served.signature.names[0]: rows}, "predict").values()

    np.testing.assert_allclose(outputs, model.predict(rows, verbose=0), rtol=1e-5, atol=1e-6)


@flavour.one_is_enough
def test_an_estimator_is_asked_by_the_names_of_its_columns(tmp_path: Path, keras: Any) -> None:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    estimator = Estimator.from_keras(model=model, engine="local", workers=1)
    estimator.fit({"pixels": X, "y": X[:, 0]}, feature_cols=["pixels"], label_cols=["y"], epochs=1)
    om = Store(tmp_path / "store")

    served = load(om.store, om.models.put(estimator, "net"), trusted=False).predictor

    assert served.signature.names == ("pixels",)
    outputs = served.call({"pixels": X}, "predict")
    expected = estimator.get_model().predict(X, verbose=0)
    np.testing.assert_allclose(next(iter(outputs.values())), expected, rtol=1e-5)


@flavour.tensorflow_only
def test_a_saved_model_is_asked_by_its_default_signature(tmp_path: Path, keras: Any) -> None:
    model = keras.Sequential([keras.layers.Input((4,), name="x"), keras.layers.Dense(2)])
    model.export(str(tmp_path / "saved"), verbose=False)
    om = Store(tmp_path / "store")

    served = load(om.store, om.models.put(tmp_path / "saved", "saved"), trusted=False).predictor

    (name,) = served.signature.names
    (outputs,) = served.call({name: X}, "predict").values()
    np.testing.assert_allclose(outputs, model.predict(X, verbose=0), rtol=1e-5)
