"""Rounds and asynchronous training are plain tasks: Spark allocates executors for them, and retries them."""

from __future__ import annotations

from typing import Any

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


def test_workers_that_must_run_at_once_are_refused_where_executors_come_and_go(told: dict[str, Any]) -> None:
    assert "spark.dynamicAllocation.enabled=true" in told["refusal"]
    assert "sync='rounds'" in told["refusal"]


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
    assert "the others go on without it" in " ".join(found["said"])
