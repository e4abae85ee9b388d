"""Keras models on Spark DataFrames, each Keras in a driver process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.in_turn import Printed
from tests.spark_programs.cluster import Cluster
from tests.spark_programs.conftest import MNIST_SIZE, last_line, run_programs
from tests.whole import WHOLE, whole_only

pytestmark = [pytest.mark.spark, pytest.mark.keras, pytest.mark.slow, pytest.mark.timeout(600)]

ENOUGH = 0.975 if WHOLE else 0.85


def test_a_frame_of_uneven_partitions_is_trained_judged_and_scored(keras_on_two_slots: Printed) -> None:
    assert_trained_judged_and_scored(keras_on_two_slots("keras_frame.py"))


def test_keras_models_files_and_saved_models_are_stages(keras_on_two_slots: Printed) -> None:
    told = last_line(keras_on_two_slots("ml_keras.py"))

    assert told["untouched"] == 0
    assert told["learned"] > 0.1
    assert told["same"]
    assert told["refitted"] < 1e-5
    assert told["kinds"] == [True, True]
    assert max(told["off"]) < 1e-5


@whole_only
@pytest.mark.parametrize("flavour", ["jax", "torch", "tf_keras"])
def test_a_frame_of_uneven_partitions_on_other_backends(flavour: str, tmp_path: Path) -> None:
    printed = run_programs(tmp_path, ("keras_frame.py", flavour, tmp_path))
    assert_trained_judged_and_scored(printed("keras_frame.py"))


def assert_trained_judged_and_scored(printed: str) -> None:
    told = last_line(printed)

    assert told["samples"] == [97] * 4, "three epochs through Spark, and one straight from files"
    assert told["ranks agree"]
    assert told["saved what was trained"]
    assert told["figures"]["num_samples"] == 97
    for name in ("loss", "accuracy", "auc"):
        assert told["figures"][name] == pytest.approx(told["judged"][name], abs=1e-5), name
    assert told["columns"] == ["id", "name", "x", "y", "prediction"]
    assert told["rows kept"]
    assert told["off by"] < 1e-6


# PyTorch learns MNIST on a cluster always, and Keras the programs and examples of its users.
@whole_only
def test_mnist_is_learned_on_two_local_slots(mnist: Path, keras_on_two_slots: Printed) -> None:
    assert_learned(keras_on_two_slots("mnist_keras.py"))


@whole_only
@pytest.mark.cluster
def test_mnist_is_learned_on_a_master_and_two_workers(cluster: Cluster, mnist: Path, tmp_path: Path) -> None:
    printed = run_programs(tmp_path, ("mnist_keras.py", "jax", cluster.address, mnist, tmp_path, MNIST_SIZE))
    assert_learned(printed("mnist_keras.py"))


def assert_learned(printed: str) -> None:
    reached = last_line(printed)

    assert reached["lenet"] >= ENOUGH
    assert reached["dense"] >= ENOUGH
