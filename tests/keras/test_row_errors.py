"""Rows that fail while a Keras model scores others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kindler import Estimator
from tests.keras.flavour import FLAVOUR

pytestmark = [pytest.mark.keras, pytest.mark.filterwarnings("ignore::kindler.errors.RowErrorsWarning")]


def test_values_that_cannot_be_read_fail_alone(keras: Any) -> None:
    est = Estimator.from_keras(model=keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(3)]))
    rows: list[Any] = [[float(i), 1.0] for i in range(40)]
    rows[0], rows[9] = None, [1.0]
    good = [row for i, row in enumerate(rows) if i not in (0, 9)]

    scored = est.predict(pa.table({"x": rows}), 16, "x", on_error="column")

    assert [i for i, text in enumerate(scored["prediction_error"].to_pylist()) if text] == [0, 9]
    alone = est.predict(np.array(good, np.float32), 16)
    assert np.array_equal(np.array(scored["prediction"].drop_null().to_pylist(), np.float32), alone)


@pytest.mark.skipif(FLAVOUR == "jax", reason="JAX takes the nearest row for an index that does not exist")
def test_rows_that_the_model_raises_for_fail_alone(keras: Any) -> None:
    model = keras.Sequential([keras.layers.Input((1,), dtype="int32"), keras.layers.Embedding(10, 2)])
    est = Estimator.from_keras(model=model)
    words = np.arange(64).reshape(-1, 1).astype("int32") % 10
    expected = est.predict(words)
    words[[3, 40], 0] = 10

    outputs, errors = est.predict(words, 32, on_error="column")

    assert [i for i, text in enumerate(errors) if text] == [3, 40]
    good = np.delete(np.arange(64), [3, 40])
    np.testing.assert_allclose(outputs[good], expected[good])
    assert np.isnan(outputs[[3, 40]]).all()
