"""Runs on a real cluster go on when an executor is killed: with as many workers, or with those left."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.in_turn import Printed
from tests.spark_programs.conftest import last_line

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(600)]

ROWS, KEPT = 50, 9


@pytest.fixture(scope="module")
def told(torch_on_the_cluster: Printed) -> dict[str, Any]:
    """What the program says of its runs."""
    runs: dict[str, Any] = last_line(torch_on_the_cluster("recovery.py"))
    return runs


def test_a_run_that_lost_an_executor_ends_as_if_it_had_not(told: dict[str, Any]) -> None:
    alone, replaced = told["alone"], told["replaced"]

    assert (alone["attempts"], replaced["attempts"]) == ([2], [2])
    assert replaced["loss"] == alone["loss"]
    assert replaced["weights"] == alone["weights"]
    assert replaced["rows"] == [ROWS] * 3


def test_a_run_whose_executor_is_replaced_makes_no_step_again(told: dict[str, Any]) -> None:
    times = Counter(row for noted in told["replaced"]["noted"] for row in [(noted["step"], *noted["ids"])])

    assert set(times.values()) == {1}


def test_with_fewer_executors_the_run_goes_on_with_those_that_are_left(told: dict[str, Any]) -> None:
    grown = told["grown"]

    said = " ".join(grown["said"])
    assert "1 of 2 slots are left; waiting up to 2 s for the lost executor to be replaced" in said
    assert "no replacement came in 2 s: the run continues with 1 instead of 2 workers" in said
    # The epoch goes on from the checkpoint in its middle: the rows up to there were taken by two.
    epoch = [n for n in grown["noted"] if n["epoch"] == 2 and (n["size"] == 1 or n["step"] <= KEPT)]
    assert sorted(i for n in epoch for i in n["ids"]) == list(range(ROWS)), "every row once in the epoch"


def test_a_run_that_went_on_with_fewer_has_all_workers_again_once_executors_are_back(
    told: dict[str, Any],
) -> None:
    grown = told["grown"]

    assert grown["attempts"] == [2, 1, 2]
    assert grown["rows"] == [ROWS] * 3
    assert "the lost executors are back: the run continues with 2 instead of 1 workers." in " ".join(
        grown["said"]
    )
    sizes = {epoch: {n["size"] for n in grown["noted"] if n["epoch"] == epoch} for epoch in (1, 3)}
    assert sizes[1] == {2}
    assert 2 in sizes[3], "the last epoch was made by all of them"


def test_each_worker_sees_the_gpu_that_spark_gave_to_its_task(told: dict[str, Any]) -> None:
    seen = {tuple(noted["gpus"]) for noted in told["alone"]["noted"]}

    assert len(seen) == 2, "one for each worker"
    for given, visible in seen:
        assert given
        assert visible == given


def test_more_nodes_than_the_master_has_cores_for_are_refused_long_before_the_time_to_start(
    told: dict[str, Any],
) -> None:
    for message in told["too many"]:
        assert "workers=3 but this Spark application can run 2 tasks side by side" in message
    assert len(told["too many"]) == 2
