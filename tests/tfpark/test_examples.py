"""The programs of examples/tfpark, on a part of MNIST; with `KINDLER_TEST_WHOLE=1` on all of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.whole import WHOLE

pytest.importorskip("tf_slim")

EXAMPLES = Path(__file__).parents[2] / "examples" / "tfpark"
SIZE = [] if WHOLE else ["--rows", "640", "--epochs", "1"]
HELPERS = {"lenet.py", "mnist.py"}
PROGRAMS = [
    ["train_lenet.py", "predict_lenet.py"],
    ["train_keras.py", "predict_keras.py"],
    ["keras_model.py"],
    ["estimator.py"],
]

pytestmark = pytest.mark.timeout(3600 if WHOLE else 600)


@pytest.fixture(scope="session")
def outputs(mnist: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each program prints; each runs once, in a process of its own."""
    folder, printed = tmp_path_factory.mktemp("tfpark"), {}

    def run(name: str) -> str:
        if name not in printed:
            done = subprocess.run(
                [sys.executable, str(EXAMPLES / name), "--data", str(mnist), "--folder", str(folder), *SIZE],
                env={**os.environ, "PYTHONPATH": str(EXAMPLES.parents[1] / "src")},
                capture_output=True,
                text=True,
                timeout=3000,
            )
            assert done.returncode == 0, done.stderr[-4000:]
            printed[name] = done.stdout
        return printed[name]

    return run


def number(name: str, text: str) -> float:
    found = re.search(rf"^{name} ([\d.e+-]+)$", text, re.MULTILINE)
    assert found, f"no {name!r} in:\n{text}"
    return float(found[1])


def test_every_program_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        *HELPERS,
        *(p for group in PROGRAMS for p in group),
    }


@pytest.mark.parametrize("programs", PROGRAMS if WHOLE else PROGRAMS[:1], ids=lambda group: group[-1])
def test_the_programs_learn_mnist_and_predict_what_a_session_does(outputs: Any, programs: list[str]) -> None:
    printed = [outputs(name) for name in programs][-1]

    assert number("accuracy", printed) >= (0.97 if WHOLE else 0.1)
    for line in re.findall(r"^difference .*$", printed, re.MULTILINE):
        assert float(line.rpartition(" ")[2]) <= 1e-5
