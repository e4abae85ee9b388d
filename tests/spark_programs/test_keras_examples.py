"""The files of examples/ that use Keras, in the process of the other programs with Keras on TensorFlow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.test_examples import number
from tests.in_turn import Printed
from tests.spark_programs.conftest import EXAMPLES, run_programs
from tests.whole import whole_only

pytestmark = [pytest.mark.spark, pytest.mark.keras, pytest.mark.slow, pytest.mark.timeout(600)]


def test_first_steps_with_keras(keras_on_two_slots: Printed) -> None:
    printed = keras_on_two_slots("first_steps_keras.py")

    assert number("'accuracy'", printed) > 0.8
    assert number("'num_samples'", printed) == 1797


def test_keras_learns_the_digits_and_saves_a_plain_keras_file(
    keras_on_two_slots: Printed, keras_folder: Path
) -> None:
    assert_learned(keras_on_two_slots("keras_digits.py"), keras_folder)


def test_a_keras_model_learns_from_strings(keras_on_two_slots: Printed) -> None:
    printed = keras_on_two_slots("keras_text.py")

    assert number("test accuracy", printed) > 0.95
    assert "predicted: [1, 0]" in printed


@whole_only
def test_keras_on_jax_learns_the_digits_too(tmp_path: Path) -> None:
    program = EXAMPLES / "keras_digits.py"
    assert_learned(run_programs(tmp_path, (program, "--backend", "jax"))("keras_digits.py"), tmp_path)


def assert_learned(printed: str, folder: Path) -> None:
    assert number("test accuracy", printed) > 0.93
    assert "plain Keras predicts the same: True" in printed
    assert (folder / "keras-digits" / "digits.keras").exists()
