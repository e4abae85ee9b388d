"""What scoring is sent of a Keras model: its own variables, without those of its optimizer."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from kindler import Estimator

pytestmark = pytest.mark.keras

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
WIDE = 40_000
WEIGHTS = (8 * WIDE + WIDE + WIDE + 1) * 4  # bytes


def made(keras: Any) -> Any:
    model = keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.Dense(WIDE, activation="relu"), keras.layers.Dense(1)]
    )
    model.compile(optimizer="adam", loss="mse")
    return model


@pytest.fixture(scope="module")
def est(keras: Any) -> Estimator:
    est = Estimator.from_keras(model=made(keras), workers=1)
    est.fit((X, X[:, :1]), epochs=1, verbose=0)
    return est


def test_a_trained_model_is_sent_without_its_optimizer_and_each_weight_once(est: Estimator) -> None:
    assert WEIGHTS < len(pickle.dumps(est._live.for_scoring())) < 1.1 * WEIGHTS


def test_a_model_that_nobody_has_touched_has_the_same_bytes(est: Estimator) -> None:
    assert est._live.for_scoring() is est._live.for_scoring()


def test_a_model_that_was_given_other_weights_predicts_with_them(est: Estimator) -> None:
    model = est.get_model()
    before = est.predict(X, verbose=0)
    assert before == pytest.approx(np.asarray(model.predict(X, verbose=0)), abs=1e-4)

    model.set_weights([weights * 2 for weights in model.get_weights()])

    after = est.predict(X, verbose=0)
    assert after == pytest.approx(np.asarray(model.predict(X, verbose=0)), abs=1e-4)
    assert not np.allclose(after, before)
