"""Keras models and SavedModels keep the contract of a model kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flavour
import numpy as np
import pytest

from kindler.testing.models import ModelKindContract
from tests.whole import WHOLE

W = np.arange(6, dtype="float32").reshape(3, 2) - 2


def layer(keras: Any) -> Any:
    model = keras.Sequential(
        [keras.layers.Input((3,), name="x"), keras.layers.Dense(2, use_bias=False, activation="relu")]
    )
    model.set_weights([W])
    return model


class TestKeras(ModelKindContract):
    kind = "tf_keras" if flavour.FLAVOUR == "tf_keras" else "keras"
    enough = "torch"

    @pytest.fixture
    def model(self, keras: Any) -> Any:
        return layer(keras)

    @pytest.fixture
    def rows(self) -> Any:
        return np.random.default_rng(0).normal(size=(5, 3)).astype("float32")

    @pytest.fixture
    def expected(self, rows: Any) -> Any:
        return np.maximum(rows @ W, 0)

    @pytest.fixture
    def refused(self, keras: Any) -> Any:
        doubled = keras.layers.Lambda(lambda x: x * 2)
        return keras.Sequential([keras.layers.Input((3,)), doubled])

    def test_a_fresh_process_predicts_the_same(
        self, stored: Any, tmp_path: Path, rows: Any, expected: Any
    ) -> None:
        if self.enough != flavour.FLAVOUR and not WHOLE:
            pytest.skip(f"on {self.enough}; on every backend with KINDLER_TEST_WHOLE=1")
        super().test_a_fresh_process_predicts_the_same(stored, tmp_path, rows, expected)


@flavour.tensorflow_only
class TestSavedModel(TestKeras):
    kind = "savedmodel"
    enough = "tensorflow"

    @pytest.fixture
    def model(self, keras: Any, tmp_path: Path) -> Any:
        layer(keras).export(str(tmp_path / "saved"), verbose=False)
        return tmp_path / "saved"

    @pytest.fixture
    def refused(self, tmp_path: Path) -> Any:
        import tensorflow as tf

        class Reads(tf.Module):  # type: ignore[misc]
            @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])  # type: ignore[untyped-decorator]
            def read(self, names: Any) -> Any:
                return tf.io.read_file(names[0])

        tf.saved_model.save(Reads(), str(tmp_path / "reads"))
        return tmp_path / "reads"
