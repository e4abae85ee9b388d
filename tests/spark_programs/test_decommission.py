"""A run on a real cluster one of whose executors is decommissioned goes on elsewhere, and repeats no step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.spark_programs.cluster import standalone
from tests.spark_programs.conftest import last_line, run_programs

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(600)]

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


def test_no_row_is_trained_twice_in_an_epoch(told: dict[str, Any]) -> None:
    times = Counter((noted["epoch"], row) for noted in told["noticed"]["noted"] for row in noted["ids"])

    assert set(times.values()) == {1}
    assert len(times) == 3 * ROWS


def test_no_worker_goes_on_where_spark_takes_the_executor_away(told: dict[str, Any]) -> None:
    last = [noted for noted in told["noticed"]["noted"] if noted["epoch"] == 3]

    assert last
    assert told["gpu"] not in {noted["gpus"][0] for noted in last}
