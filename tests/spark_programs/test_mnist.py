"""MNIST on one machine and on a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.in_turn import Printed
from tests.spark_programs.conftest import MNIST_SIZE, run_programs
from tests.whole import whole_only

# Always, examples/mnist_spark.py learns it on local slots, and test_elastic.py trains on the cluster to the
# weights of one process.
pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600), whole_only]

ENOUGH = 0.975


def test_two_local_slots_reach_the_accuracy(mnist: Path, tmp_path: Path) -> None:
    printed = run_programs(tmp_path, ("mnist.py", "local[2]", mnist, tmp_path, MNIST_SIZE))
    assert float(printed("mnist.py")) >= ENOUGH


@pytest.mark.cluster
def test_a_master_and_two_workers_reach_the_accuracy(mnist: Path, torch_on_the_cluster: Printed) -> None:
    assert float(torch_on_the_cluster("mnist.py")) >= ENOUGH
