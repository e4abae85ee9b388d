"""Which labels the losses of Keras can mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flavour import KERAS

from kindler.errors import DataError
from kindler.frameworks.keras.dataset import label_rules
from kindler.frameworks.labels import LabelSource
from tests.keras.test_labels import model

pytestmark = pytest.mark.keras


def complaint(made: Any, values: Any, *, by_name: bool = False) -> str:
    source = LabelSource((np.asarray(values),), ("kind",), lambda row: row)
    for rule in label_rules(made, ["kind"], by_name=by_name):
        try:
            rule(source)
        except DataError as exc:
            return str(exc)
    return ""


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
