"""Keras models in the server: warmed up, and in a sandboxed process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import flavour
import numpy as np
import pytest

from kindler import Store, sandbox
from kindler.models.loaded import load, wrap
from kindler.models.signature import fit
from kindler.serve.model_process import warmed
from kindler.serve.model_registry import ModelRegistry
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import Stats
from kindler.serve.threads import Threads

X = np.random.default_rng(0).random((5, 4), np.float32)


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
        assert (warmed(served) == {"predict": True}) == (name == "rows")
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
    om = Store(tmp_path / "store")

    served = load(om.store, om.models.put(tmp_path / "saved", "saved"), trusted=False).predictor

    np.testing.assert_allclose(served.call({"x": X}, "predict")["y"], X * 2)
    words = np.array([b"abc", b"\xff"], dtype=object)
    signature = served.signatures["length"]
    fitted = fit(signature, {"t": words})  # bytes stay bytes here: they may be anything
    assert served.call(fitted, "signature:length")["n"].tolist() == [3, 1]
    assert warmed(served) == {"predict": True}


@flavour.one_unless_whole
def test_a_model_in_a_sandboxed_process_gives_the_numbers_of_predict(tmp_path: Path, keras: Any) -> None:
    if (lacking := sandbox.unavailable_reason()) is not None:
        pytest.skip(f"processes cannot be sandboxed here: {lacking}")
    model = keras.Sequential([keras.layers.Input((4,), name="x"), keras.layers.Dense(2)])
    om = Store(tmp_path / "store")
    om.models.put(model, "net")

    async def play() -> Any:
        threads = [Threads(2, "test") for _ in range(3)]
        pools = dict(zip(("catalog_threads", "lookup_threads", "load_threads"), threads, strict=True))
        models = ModelRegistry(om, ServeSettings(processes=1, timeout_s=120), stats=Stats(), **pools)
        try:
            found = await models.find(("default", "net", None))
            (name,) = found.predictor.signature.names
            asked = [
                found.batcher.submit({name: X[i : i + 1]}, "predict", rows=1, timeout_s=60) for i in range(5)
            ]
            return [next(iter((await ticket.future).values())) for ticket in asked]
        finally:
            models.close()
            for pool in threads:
                pool.shutdown()

    outputs = np.concatenate(asyncio.run(play()))
    om.close()

    np.testing.assert_allclose(outputs, model.predict(X[:5], verbose=0), rtol=1e-5, atol=1e-6)
