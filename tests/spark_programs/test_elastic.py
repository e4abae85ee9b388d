"""Training on executors that Spark allocates for it, and whose tasks it retries, one of them being killed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.spark_programs.cluster import Cluster
from tests.spark_programs.conftest import last_line, run_programs

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(600)]

ROWS = 80


@pytest.fixture(scope="module")
def told(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("elastic")
    program = ("elastic.py", cluster.address, folder)
    printed = run_programs(folder, program, quiet=False)  # Spark tells of executors that are killed
    runs: dict[str, Any] = last_line(printed("elastic.py"))
    return runs


def test_workers_that_train_together_wait_for_executors_and_make_the_steps_of_one_process(
    told: dict[str, Any],
) -> None:
    found = told["allreduce"]

    assert told["executors at first"] == 0
    assert found["rows"] == [ROWS] * 3
    np.testing.assert_allclose(found["weights"]["0.weight"], told["one process"], atol=1e-5)


def test_a_run_whose_workers_train_together_outlives_the_loss_of_an_executor(told: dict[str, Any]) -> None:
    undisturbed, killed = told["allreduce"], told["allreduce killed"]

    assert killed["killed"]
    assert killed["rows"] == [ROWS] * 3
    assert "and no step was repeated" in " ".join(killed["said"])
    expected = undisturbed["weights"]["0.weight"]
    np.testing.assert_allclose(killed["weights"]["0.weight"], expected, atol=1e-5)


def test_rounds_whose_executor_was_killed_end_as_undisturbed_ones(told: dict[str, Any]) -> None:
    undisturbed, killed = told["undisturbed"], told["killed"]

    assert (undisturbed["killed"], killed["killed"]) == (False, True)
    assert killed["loss"] == undisturbed["loss"]
    assert killed["weights"] == undisturbed["weights"]
    assert killed["rows"] == [ROWS] * 3
    assert "another one takes its place" in " ".join(killed["said"])
    assert undisturbed["said"] == []


def test_an_executor_that_was_killed_does_not_end_an_asynchronous_run(told: dict[str, Any]) -> None:
    found = told["async"]

    assert found["killed"]
    assert found["lost"] == [0, 1, 1]
    assert found["rows"][0] == ROWS
    assert found["rows"][2] < ROWS
    assert "the others continue without it" in " ".join(found["said"])


def test_the_doctor_looks_at_the_executors_and_their_way_to_the_driver(told: dict[str, Any]) -> None:
    checks = {check["name"]: check for check in told["checked"]}

    assert {check["status"] for check in told["checked"]} <= {"ok", "warn"}
    assert checks["ports"]["found"] == "executors reach the driver"
    assert checks["torch"]["found"].startswith("2.")
    assert {"spark", "executors", "python", "kindler", "shared memory", "temporary files"} <= set(checks)
