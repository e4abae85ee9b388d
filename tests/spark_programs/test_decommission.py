"""Runs on a real cluster that takes executors away with notice go on elsewhere, and repeat no step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.spark_programs.cluster import standalone
from tests.spark_programs.conftest import last_line, run_programs
from tests.whole import whole_only

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(600), whole_only]

ROWS = 50


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("decommission")
    with standalone(folder, workers=3) as cluster:
        program = ("decommission.py", cluster.address, folder)
        printed = run_programs(folder, program, quiet=False)  # Spark tells of the executor that it loses
    runs: dict[str, Any] = last_line(printed("decommission.py"))
    return runs


def test_the_run_is_saved_and_goes_on_to_the_same_end(told: dict[str, Any]) -> None:
    alone, noticed = told["alone"], told["noticed"]

    assert (alone["attempts"], noticed["attempts"]) == ([2], [2, 2])
    assert noticed["loss"] == alone["loss"]
    assert noticed["weights"] == alone["weights"]
    assert noticed["rows"] == [ROWS] * 3
    assert any("was given notice (Spark decommissions executor " in line for line in noticed["said"])


@pytest.mark.parametrize("run", ["noticed", "filed"])
def test_no_row_is_trained_twice_in_an_epoch(told: dict[str, Any], run: str) -> None:
    times = Counter((noted["epoch"], row) for noted in told[run]["noted"] for row in noted["ids"])

    assert set(times.values()) == {1}
    assert len(times) == 3 * ROWS


def test_no_worker_goes_on_where_spark_takes_the_executor_away(told: dict[str, Any]) -> None:
    last = [noted for noted in told["noticed"]["noted"] if noted["epoch"] == 3]

    assert last
    assert told["gpu"] not in {noted["gpus"][0] for noted in last}


def test_spark_replaces_the_executors_of_a_machine_whose_notice_is_in_a_file(told: dict[str, Any]) -> None:
    assert told["filed"]["attempts"] == [2, 2]
    assert any("/notice): the run was saved after step" in line for line in told["filed"]["said"])
    assert {*told["before"]} & {*told["after"]} == {"driver"}
