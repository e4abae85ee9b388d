"""Gangs on barrier tasks: the same roles, feeds and ends as on the local engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kindler import RunSettings
from kindler.engine.gang import Gang
from kindler.engine.job import Job, RankSpec, equal_ranks
from kindler.errors import ConfigError, FeedError, TrainingError, WorkerError
from kindler.spark import engine

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("no_workers_left")]

BATCHES = "spark.sql.execution.arrow.maxBytesPerBatch"


@pytest.fixture(autouse=True)
def _the_session_keeps_its_settings(spark: Any) -> Iterator[None]:
    before = spark.conf.get(BATCHES)
    yield
    assert spark.conf.get(BATCHES) == before


def target(name: str) -> str:
    return f"tests.unit.gang_targets:{name}"


def start(spark: Any, name: str, count: int = 1, **options: Any) -> Gang:
    return engine.start(Job(ranks=equal_ranks(target(name), count), **options), spark=spark)


def test_roles_feeds_and_held_ports_work_on_tasks(spark: Any) -> None:
    ranks = (
        RankSpec(
            target=target("facts"), role="chief", environment={"KINDLER_TEST_ROLE": "the chief"}, ports=1
        ),
        RankSpec(target=target("echo")),
        RankSpec(target=target("hang"), role="ps", service=True),
    )
    large = bytes(9 << 20)
    with engine.start(Job(ranks=ranks), spark=spark) as gang:
        endpoint = gang.address(0)
        gang.push(1, "rows", b"small")
        gang.push(1, "rows", large)
        gang.feed(1, "rows").end()
        echoed = list(gang.output(1, "echoed"))
        outcomes = gang.wait()

    assert echoed == [(b"small",), (large,)]
    told = json.loads(outcomes[0].buffers[0])
    assert (told["role"], told["variable"], told["roles"]) == (
        "chief",
        "the chief",
        ["chief", "worker", "ps"],
    )
    assert told["spec"] == {"chief": [endpoint]}
    assert outcomes[1].buffers == (b"%d" % (5 + len(large)),)


def test_the_exception_of_a_role_reaches_the_driver_and_a_push_says_why_it_ended(spark: Any) -> None:
    ranks = (RankSpec(target=target("hang")), RankSpec(target=target("fail"), role="evaluator"))

    with engine.start(Job(ranks=ranks), spark=spark) as gang:
        with pytest.raises(LookupError, match="^evaluator gives up") as caught:
            gang.wait()
        with pytest.raises(FeedError, match=r"worker 1 \(evaluator\) failed with LookupError"):
            gang.push(0, "rows", b"")

    assert isinstance(caught.value, WorkerError)
    assert (caught.value.rank, caught.value.role) == (1, "evaluator")


def test_two_gangs_run_in_one_session_and_one_of_them_is_aborted(spark: Any) -> None:
    with start(spark, "hang", 2) as first:
        with start(spark, "echo") as second:
            first.members(), second.members()  # both are up
            second.push(0, "rows", b"x")
            second.feed(0, "rows").end()
            assert second.wait()[0].buffers == (b"1",)
        assert first.is_running
        first.abort("enough")
        with pytest.raises(TrainingError, match="the gang was aborted: enough"):
            first.wait()


def test_workers_that_meet_among_themselves_have_roles_and_no_feeds(spark: Any) -> None:
    ranks = (RankSpec(target=target("facts"), role="chief", ports=1), RankSpec(target=target("echo")))
    job = Job(ranks=ranks, settings=RunSettings(rendezvous="workers"))

    with engine.start(job, spark=spark) as gang:
        with pytest.raises(ConfigError, match="out of reach of the driver"):
            gang.push(1, "rows", b"")
        with pytest.raises(ConfigError, match="these meet only among themselves"):
            gang.wait()
