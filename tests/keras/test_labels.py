"""Labels that a loss cannot mean are refused with column and row, where Keras would cut or ignore them."""

from __future__ import annotations

from typing import Any

import numpy as np
import problems
import pytest
from flavour import KERAS

from kindler import Estimator
from kindler.errors import DataError

pytestmark = pytest.mark.keras

DATA = problems.problem(40)


def model(loss: Any, width: int = 3) -> Any:
    inputs = KERAS.Input((problems.WIDTH,))
    made = KERAS.Model(inputs, KERAS.layers.Dense(width, activation="softmax", name="kind")(inputs))
    made.compile(optimizer="sgd", loss=loss)
    return made


def test_a_label_between_two_classes_ends_training_and_evaluation_with_its_row() -> None:
    labels = np.arange(40) % 3 + 0.0
    labels[17] = 1.5
    est = Estimator.from_keras(model=model("sparse_categorical_crossentropy"), workers=2, engine="local")
    options = {"batch_size": 8, "verbose": 0, "feature_cols": "x", "label_cols": "kind"}

    with pytest.raises(DataError, match=r"column 'kind', row 17: is 1\.5, which is not a class number"):
        est.fit({"x": DATA["x"], "kind": labels}, epochs=1, **options)
    with pytest.raises(DataError, match=r"column 'kind', row 17: is 1\.5, which is not a class number"):
        est.evaluate({"x": DATA["x"], "kind": labels}, **options)
