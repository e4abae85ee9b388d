"""Trained Keras models as OpenVINO and ONNX: they compute what the model computes, for any number of rows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flavour import FLAVOUR, KERAS

from kindler import Estimator
from kindler.errors import MissingExtraError

pytest.importorskip("openvino")
pytestmark = pytest.mark.keras

X = np.random.default_rng(0).normal(size=(37, 6)).astype("float32")
NEEDS = {"tensorflow": "tf2onnx", "tf_keras": "tf2onnx", "jax": "jax2onnx", "torch": "onnx"}


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def scoring() -> Estimator:
    """Two inputs, two outputs; never trained by Kindler."""
    layers = KERAS.layers
    left, right = KERAS.Input((6,), name="left"), KERAS.Input((2,), name="right")
    joined = layers.Concatenate()([layers.Dense(5, activation="relu")(left), right])
    outputs = [layers.Dense(3, activation="softmax")(joined), layers.Dense(1)(joined)]
    return Estimator.from_keras(model=KERAS.Model([left, right], outputs))


def test_openvino_computes_what_keras_does(scoring: Estimator, tmp_path: Path) -> None:
    data = [X, X[:, :2].copy()]
    expected = scoring.predict(data)

    for place, found in enumerate(scoring.predict(data, batch_size=5, runtime="openvino")):
        close(found, expected[place])
    scoring.to_openvino(tmp_path / "net.xml", example=[array[:2] for array in data])
    for place, found in enumerate(Estimator.from_openvino(tmp_path / "net.xml").predict(data)):
        close(found, expected[place])


def test_onnx_computes_what_keras_does_or_says_what_is_missing(scoring: Estimator, tmp_path: Path) -> None:
    data = [X, X[:, :2].copy()]
    path, needed = tmp_path / "net.onnx", NEEDS[FLAVOUR]
    if importlib.util.find_spec(needed) is None:
        with pytest.raises(MissingExtraError, match=needed):
            scoring.to_onnx(path, example=data)
        return
    scoring.to_onnx(path, example=data)
    again = Estimator.from_openvino(path)

    for found, expected in zip(again.predict(data), scoring.predict(data), strict=True):
        close(found, expected)
