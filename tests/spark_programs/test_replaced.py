"""Runs on a real cluster go on when executors and tasks are killed: nobody else is started again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.spark_programs.cluster import Cluster
from tests.spark_programs.conftest import last_line, run_programs
from tests.whole import whole_only

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(600)]

STEPS, LOSSES = 21, 4


@pytest.fixture(scope="module", params=["frame", pytest.param("files", marks=whole_only)])
def told(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the program says of its runs on rows that Spark prepares, and on files that workers read."""
    folder = tmp_path_factory.mktemp("replaced")
    program = ("replaced.py", cluster.address, folder, request.param)
    runs: dict[str, Any] = last_line(run_programs(folder, program, quiet=False)("replaced.py"))
    return runs


def test_a_run_that_lost_executors_tasks_and_workers_ends_as_if_undisturbed(told: dict[str, Any]) -> None:
    alone, disturbed = told["alone"], told["disturbed"]

    assert disturbed["loss"] == alone["loss"]
    assert disturbed["weights"] == alone["weights"]
    assert " ".join(disturbed["said"]).count("and no step was repeated") == LOSSES


def test_no_step_is_repeated_and_each_loss_costs_one_process(told: dict[str, Any]) -> None:
    for name, processes in (("alone", 1), ("disturbed", 1 + LOSSES // 2)):
        for rank in (0, 1):
            assert [step for step, _ in told[name]["steps"][rank]] == list(range(1, STEPS + 1))
            assert len(set(told[name]["processes"][rank])) == processes


def test_each_rank_makes_a_step_again_with_the_same_rows(told: dict[str, Any]) -> None:
    for rank in (0, 1):
        for (_, ids), (_, seen) in zip(
            *(told[name]["steps"][rank] for name in ("alone", "disturbed")), strict=True
        ):
            assert seen[-len(ids) :] == ids
