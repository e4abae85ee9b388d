"""Keras models on Spark DataFrames, each Keras in a driver process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cluster import standalone

from tests.whole import WHOLE, whole_only

pytestmark = [pytest.mark.spark, pytest.mark.keras]

PROGRAMS = Path(__file__).parent / "programs"
# What the session of these tests sets for its own executors is not for another driver's.
KEPT = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK"))}


def run(*command: str | Path, timeout: float = 280) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**KEPT, "PYTHONPATH": str(PROGRAMS.parents[2] / "src"), "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "flavour",
    ["tensorflow", *(pytest.param(name, marks=whole_only) for name in ("jax", "torch", "tf_keras"))],
)
def test_a_frame_of_uneven_partitions_is_trained_judged_and_scored(flavour: str, tmp_path: Path) -> None:
    told = json.loads(run(PROGRAMS / "keras_frame.py", flavour, tmp_path))

    assert told["samples"] == [97] * 3
    assert told["ranks agree"]
    assert told["saved what was trained"]
    assert told["figures"]["num_samples"] == 97
    for name in ("loss", "accuracy", "auc"):
        assert told["figures"][name] == pytest.approx(told["judged"][name], abs=1e-5), name
    assert told["columns"] == ["id", "name", "x", "y", "prediction"]
    assert told["rows kept"]
    assert told["off by"] < 1e-6


PLAIN = """
import sys
import numpy as np
import keras
kept = np.load(sys.argv[1] + "/scores.npz")
model = keras.saving.load_model(sys.argv[1] + "/lenet.keras")
scores = model.predict(kept["x"].reshape(-1, 28, 28, 1), verbose=0)
print(float(np.abs(scores - kept["scores"]).max()), float((scores.argmax(1) == kept["y"]).mean()))
"""


@pytest.mark.slow
def test_orcas_program_for_tensorflow_2_runs_with_its_import_line_changed(
    mnist: Path, tmp_path: Path
) -> None:
    run(PROGRAMS / "orca_keras.py", mnist, tmp_path)

    kept = np.load(tmp_path / "scores.npz")
    off_by, accuracy = map(float, run("-c", PLAIN, tmp_path).split())
    assert kept["loss"][-1] < kept["loss"][0]
    assert off_by < 1e-5
    assert accuracy > 0.9


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_mnist_is_learned_on_two_local_slots(mnist: Path, tmp_path: Path) -> None:
    assert_learned("tensorflow", "local[2]", mnist, tmp_path)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(420)
def test_mnist_is_learned_on_a_master_and_two_workers(mnist: Path, tmp_path: Path) -> None:
    with standalone(tmp_path) as master:
        assert_learned("jax", master, mnist, tmp_path, small=not WHOLE)


def assert_learned(backend: str, master: str, mnist: Path, work: Path, *, small: bool = False) -> None:
    size = "small" if small else "whole"
    reached = json.loads(run(PROGRAMS / "mnist_keras.py", backend, master, mnist, work, size, timeout=400))

    assert reached["lenet"] >= (0.93 if small else 0.975)
    assert reached["dense"] >= (0.93 if small else 0.975)
