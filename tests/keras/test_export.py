"""Trained Keras models as OpenVINO and ONNX: they compute what the model computes, for any number of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flavour import FLAVOUR, KERAS, two_unless_whole

from kindler import Estimator
from tests import caller

pytest.importorskip("openvino")
pytestmark = pytest.mark.keras

X = np.random.default_rng(0).normal(size=(37, 6)).astype("float32")


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


@two_unless_whole
def test_openvino_computes_what_keras_does(scoring: Estimator, tmp_path: Path) -> None:
    data = [X, X[:, :2].copy()]
    expected = scoring.predict(data)

    example = [array[:2] for array in data]

    def exported() -> None:
        scoring.to_openvino(tmp_path / "net.xml", example=example)

    assert caller.changed_by({"to_openvino": exported}) == {}
    if FLAVOUR != "jax":  # where each export starts TensorFlow in a process of its own
        for place, found in enumerate(scoring.predict(data, batch_size=5, accelerator="openvino")):
            close(found, expected[place])
    for place, found in enumerate(Estimator.from_openvino(tmp_path / "net.xml").predict(data)):
        close(found, expected[place])


@pytest.mark.skipif(FLAVOUR == "tf_keras", reason="Keras 2 needs a package of its own for it")
@two_unless_whole
def test_onnx_computes_what_keras_does(scoring: Estimator, tmp_path: Path) -> None:
    data = [X, X[:, :2].copy()]
    scoring.to_onnx(tmp_path / "net.onnx", example=data)
    again = Estimator.from_openvino(tmp_path / "net.onnx")

    for found, expected in zip(again.predict(data), scoring.predict(data), strict=True):
        close(found, expected)
