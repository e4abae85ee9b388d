"""The whole of MNIST, on one machine and on a real cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import standalone

from tests.whole import WHOLE

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PROGRAM = Path(__file__).parent / "programs" / "mnist.py"


def accuracy(master: str, mnist: Path, work: Path, *, epochs: int = 5) -> float:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), master, str(mnist), str(work), str(epochs)],
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[3] / "src")},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return float(done.stdout)


def test_five_epochs_on_two_local_slots_reach_the_accuracy(mnist: Path, tmp_path: Path) -> None:
    assert accuracy("local[2]", mnist, tmp_path) >= 0.975


@pytest.mark.cluster
def test_a_master_and_two_workers_reach_the_accuracy(mnist: Path, tmp_path: Path) -> None:
    with standalone(tmp_path) as master:
        if WHOLE:
            assert accuracy(master, mnist, tmp_path) >= 0.975
        else:
            assert accuracy(master, mnist, tmp_path, epochs=1) >= 0.95
