"""The programs of examples/tfpark, on a part of MNIST; with `KINDLER_TEST_WHOLE=1` on all of it.

They run in this process, so that they share its Spark session. Most run only then: `tests/seeds_graphs` has
the same programs as they are on TFPark's page.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from kindler.compat import tensorflow as tf
from tests.checkout import ROOT
from tests.whole import WHOLE, whole_only

pytest.importorskip("tf_slim")

EXAMPLES = ROOT / "examples" / "tfpark"
SIZE = [] if WHOLE else ["--rows", "640", "--epochs", "1", "--steps", "2"]
LEAST = {"estimator": 0.955}  # 32 hidden units; the others have more, and 5 epochs
HELPERS = {"lenet", "mnist"}
PROGRAMS = [
    ["train_lenet", "predict_lenet"],
    ["train_keras", "predict_keras"],
    ["keras_model"],
    ["estimator"],
]

pytestmark = pytest.mark.timeout(3600 if WHOLE else 400)


def run(name: str, *arguments: str) -> None:
    """Run a program as `python examples/tfpark/name.py` would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        patch.syspath_prepend(str(EXAMPLES))
        tf.keras.backend.clear_session()
        tf.reset_default_graph()
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        finally:
            for helper in HELPERS:
                sys.modules.pop(helper, None)


def test_every_program_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        *HELPERS,
        *(p for group in PROGRAMS for p in group),
    }


@pytest.mark.parametrize(
    "programs",
    [pytest.param(group, marks=() if group == ["keras_model"] else whole_only) for group in PROGRAMS],
    ids=lambda group: group[-1],
)
def test_the_programs_learn_mnist_and_predict_what_a_session_does(
    sc: Any, mnist: Path, tmp_path: Path, programs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in programs:
        run(name, "--data", str(mnist), "--folder", str(tmp_path), *SIZE)

    printed = capsys.readouterr().out
    accuracies = [float(value) for value in re.findall(r"^accuracy.* ([\d.]+)$", printed, re.MULTILINE)]
    assert accuracies
    assert min(accuracies) >= (LEAST.get(programs[0], 0.97) if WHOLE else 0.0)
    differences = re.findall(r"^difference .* ([\d.e+-]+)$", printed, re.MULTILINE)
    assert all(float(value) <= 1e-5 for value in differences)
