"""Labels that a loss cannot mean are refused with column and row, where Keras would cut or ignore them."""

from __future__ import annotations

from typing import Any

import numpy as np
import problems
import pytest
from flavour import KERAS

from kindler import Estimator
from kindler.errors import DataError
from kindler.frameworks.keras.dataset import label_rules
from kindler.frameworks.labels import LabelSource

pytestmark = pytest.mark.keras

DATA = problems.problem(40)


def model(loss: Any, width: int = 3) -> Any:
    inputs = KERAS.Input((problems.WIDTH,))
    made = KERAS.Model(inputs, KERAS.layers.Dense(width, activation="softmax", name="kind")(inputs))
    made.compile(optimizer="sgd", loss=loss)
    return made


def complaint(made: Any, values: Any, *, by_name: bool = False) -> str:
    source = LabelSource((np.asarray(values),), ("kind",), lambda row: row)
    for rule in label_rules(made, ["kind"], by_name=by_name):
        try:
            rule(source)
        except DataError as exc:
            return str(exc)
    return ""


def test_a_label_between_two_classes_ends_training_and_evaluation_with_its_row() -> None:
    labels = np.arange(40) % 3 + 0.0
    labels[17] = 1.5
    est = Estimator.from_keras(model=model("sparse_categorical_crossentropy"), workers=2, engine="local")
    options = {"batch_size": 8, "verbose": 0, "feature_cols": "x", "label_cols": "kind"}

    with pytest.raises(DataError, match=r"column 'kind', row 17: is 1\.5, which is not a class number"):
        est.fit({"x": DATA["x"], "kind": labels}, epochs=1, **options)
    with pytest.raises(DataError, match=r"column 'kind', row 17: is 1\.5, which is not a class number"):
        est.evaluate({"x": DATA["x"], "kind": labels}, **options)


def test_every_way_to_name_the_loss_has_the_rule() -> None:
    losses = KERAS.losses
    for loss in (
        "sparse_categorical_crossentropy",
        losses.sparse_categorical_crossentropy,
        losses.SparseCategoricalCrossentropy(from_logits=True),
        ["sparse_categorical_crossentropy"],
        {"kind": losses.SparseCategoricalCrossentropy()},
    ):
        assert complaint(model(loss), [0, 1, 2]) == complaint(model(loss), [0.0, 2.0]) == ""
        assert "is 0.5, which is not a class number" in complaint(model(loss), [0.0, 0.5])
        assert "is 3, but the model's output has 3 classes" in complaint(model(loss), [1, 3])
        assert "is -1, but the model's output has 3 classes" in complaint(model(loss), [-1, 1], by_name=True)


def test_a_class_that_is_ignored_and_probabilities_are_let_through() -> None:
    ignoring = model(KERAS.losses.SparseCategoricalCrossentropy(ignore_class=-1))
    assert complaint(ignoring, [-1, 2]) == ""
    assert "is -2" in complaint(ignoring, [-2, 2])
    binary = model("binary_crossentropy", 1)
    assert complaint(binary, [0, 1]) == complaint(binary, [0.0, 0.25]) == complaint(binary, [True]) == ""
    assert "is 2; this loss needs labels from 0 to 1" in complaint(binary, [0, 2])
    assert complaint(model("mse", 1), [0.5, 7.0, -3.0]) == ""
