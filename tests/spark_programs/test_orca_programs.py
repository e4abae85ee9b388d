"""Orca's programs that need a driver of their own run with their imports changed and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.in_turn import Printed
from tests.spark_programs.conftest import last_line

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]


def test_keras_on_xshards(keras_on_two_slots: Printed) -> None:
    seen = last_line(keras_on_two_slots("orca_xshards_keras.py"))

    assert seen["engine"] == "spark"
    assert all(set(rows) == {1797} for rows in seen["num_samples"])
    assert all(accuracy > 0.9 for accuracy in seen["accuracy"])
    assert all(shapes == [[1797, 10]] for shapes in seen["shapes"])


def test_tensorflow_2_on_a_frame(mnist: Path, keras_on_two_slots: Printed) -> None:
    seen = last_line(keras_on_two_slots("orca_keras.py"))

    assert seen["loss"][-1] < seen["loss"][0]
    assert seen["off by"] < 1e-5, "plain Keras scores otherwise"
    assert seen["accuracy"] > 0.9
