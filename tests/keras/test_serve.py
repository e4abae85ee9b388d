"""Keras models behind the server's one face: the numbers of `predict`, for any number of rows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import flavour
import numpy as np
import pytest

from kindler import Estimator, Omega, jail
from kindler.errors import ConfigError
from kindler.models.loaded import load, wrap
from kindler.models.signature import fit
from kindler.serve.loaded_models import Residents
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import Stats
from kindler.serve.threads import Threads
from kindler.serve.warm_up import warmed

X = np.random.default_rng(0).random((5, 4), np.float32)


def test_a_stored_model_gives_the_numbers_of_predict(tmp_path: Path, keras: Any) -> None:
    inputs = keras.layers.Input((4,), name="x")
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(3, activation="relu")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(2, activation="softmax", name="y")(hidden))
    om = Omega(tmp_path / "store")
    version = om.models.put(model, "net")

    served = load(om.store, version, trusted=False).predictor

    assert [(s.name, s.dtype, s.shape) for s in served.signature.inputs] == [("x", "float32", (None, 4))]
    for rows in (1, 3, 5):
        (name, outputs), *_ = served.call({"x": X[:rows]}, "predict").items()
        assert name == "y"
        np.testing.assert_allclose(outputs, model.predict(X[:rows], verbose=0), rtol=1e-5, atol=1e-6)


def test_a_model_computes_on_the_cpu_unless_a_gpu_was_insisted_on(tmp_path: Path, keras: Any) -> None:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    om = Omega(tmp_path / "store")
    version = om.models.put(model, "net")

    loaded = load(om.store, version, trusted=False, device="auto")

    assert (loaded.kind.device, loaded.kind.device_bytes(version.meta)) == ("cpu", 0)
    np.testing.assert_allclose(loaded.predictor(X), model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="'cuda' was asked for"):
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
    om = Omega(tmp_path / "store")

    served = load(om.store, om.models.put(estimator, "net"), trusted=False).predictor

    assert served.signature.names == ("pixels",)
    outputs = served.call({"pixels": X}, "predict")
    expected = estimator.get_model().predict(X, verbose=0)
    np.testing.assert_allclose(next(iter(outputs.values())), expected, rtol=1e-5)


@flavour.tensorflow_only
def test_a_saved_model_is_asked_by_its_default_signature(tmp_path: Path, keras: Any) -> None:
    model = keras.Sequential([keras.layers.Input((4,), name="x"), keras.layers.Dense(2)])
    model.export(str(tmp_path / "saved"), verbose=False)
    om = Omega(tmp_path / "store")

    served = load(om.store, om.models.put(tmp_path / "saved", "saved"), trusted=False).predictor

    (name,) = served.signature.names
    (outputs,) = served.call({name: X}, "predict").values()
    np.testing.assert_allclose(outputs, model.predict(X, verbose=0), rtol=1e-5)


def test_rows_are_shared_and_filled_up_only_if_they_are_their_own(keras: Any) -> None:
    if flavour.FLAVOUR == "tf_keras":
        pytest.skip("keras.ops is of Keras 3")
    ops = keras.ops

    class Lead(keras.layers.Layer):  # type: ignore[misc]
        """Something of the whole batch, with an output that may be as long as it by chance."""

        def __init__(self, made: Any) -> None:
            super().__init__()
            self._made = made

        def call(self, x: Any) -> Any:
            return self._made(x)

    made = {
        "rows": lambda x: x * 2,
        "flat": lambda x: ops.reshape(x, (-1,)),
        "across": lambda x: ops.softmax(x, axis=0),
        "last": lambda x: x - x[-1:],
        "four": lambda x: ops.sum(x, axis=0),
    }
    for name, function in made.items():
        inputs = keras.layers.Input((4,), name="x")
        served = wrap(keras.Model(inputs, Lead(function)(inputs))).predictor
        assert (warmed(served, alone=False) == {"predict": True}) == (name == "rows")
        for rows in (1, 3, 5):
            (found,) = served.call({"x": X[:rows]}, "predict").values()
            expected = ops.convert_to_numpy(function(ops.convert_to_tensor(X[:rows])))
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@flavour.tensorflow_only
def test_a_saved_model_is_asked_by_any_of_its_signatures(tmp_path: Path, keras: Any) -> None:
    tf = pytest.importorskip("tensorflow")

    class Two(tf.Module):  # type: ignore[misc]
        @tf.function(input_signature=[tf.TensorSpec([None, 4], name="x")])  # type: ignore[untyped-decorator]
        def twice(self, x: Any) -> Any:
            return {"y": x * 2}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="t")])  # type: ignore[untyped-decorator]
        def length(self, t: Any) -> Any:
            return {"n": tf.strings.length(t)}

    two = Two()
    signatures = {"serving_default": two.twice, "length": two.length}
    tf.saved_model.save(two, str(tmp_path / "saved"), signatures=signatures)
    om = Omega(tmp_path / "store")

    served = load(om.store, om.models.put(tmp_path / "saved", "saved"), trusted=False).predictor

    np.testing.assert_allclose(served.call({"x": X}, "predict")["y"], X * 2)
    words = np.array([b"abc", b"\xff"], dtype=object)
    signature = served.signatures["length"]
    fitted = fit(signature, {"t": words})  # bytes stay bytes here: they may be anything
    assert served.call(fitted, "signature:length")["n"].tolist() == [3, 1]
    assert warmed(served, alone=False) == {"predict": True}


@flavour.one_unless_whole
def test_a_model_in_a_process_that_is_locked_in_gives_the_numbers_of_predict(
    tmp_path: Path, keras: Any
) -> None:
    if (lacking := jail.lacking()) is not None:
        pytest.skip(f"processes cannot be locked in here: {lacking}")
    model = keras.Sequential([keras.layers.Input((4,), name="x"), keras.layers.Dense(2)])
    om = Omega(tmp_path / "store")
    om.models.put(model, "net")

    async def play() -> Any:
        threads = [Threads(2, "test") for _ in range(3)]
        pools = dict(zip(("looks", "asks", "loads"), threads, strict=True))
        residents = Residents(om, ServeSettings(processes=1, timeout_s=120), stats=Stats(), **pools)
        try:
            found = await residents.find(("default", "net", None))
            (name,) = found.servable.signature.names
            asked = [
                found.batcher.submit({name: X[i : i + 1]}, "predict", rows=1, timeout_s=60) for i in range(5)
            ]
            return [next(iter((await ticket.future).values())) for ticket in asked]
        finally:
            residents.close()
            for pool in threads:
                pool.shutdown()

    outputs = np.concatenate(asyncio.run(play()))
    om.close()

    np.testing.assert_allclose(outputs, model.predict(X[:5], verbose=0), rtol=1e-5, atol=1e-6)
