"""MNIST on one machine and on a real cluster: all of it with KINDLER_TEST_WHOLE=1, a fifth otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.in_turn import Printed
from tests.whole import WHOLE

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

ENOUGH = 0.975 if WHOLE else 0.9


def test_two_local_slots_reach_the_accuracy(mnist: Path, torch_on_two_slots: Printed) -> None:
    assert float(torch_on_two_slots("mnist.py")) >= ENOUGH


@pytest.mark.cluster
def test_a_master_and_two_workers_reach_the_accuracy(mnist: Path, torch_on_the_cluster: Printed) -> None:
    assert float(torch_on_the_cluster("mnist.py")) >= ENOUGH
