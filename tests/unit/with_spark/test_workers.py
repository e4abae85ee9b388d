"""How many workers an application can have, and how many threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kindler import RunSettings
from kindler.callbacks import Callback
from kindler.engine.job import Job, equal_ranks
from kindler.engine.placement import usable_cores
from kindler.errors import ConfigError
from kindler.spark import engine, executors
from kindler.spark.executors import cores_per_host
from tests.spark.test_failures import frame, regression

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("no_workers_left")]


def test_workers_share_the_cores_of_their_machine_that_spark_and_the_system_grant(
    tmp_path: Path, spark: Any, partitioned: Callable[..., Any]
) -> None:
    class Threads(Callback):
        def on_step_end(self, run: Any) -> None:
            Path(str(tmp_path), f"threads-{run.rank}").write_text(str(torch.get_num_threads()))

    regression(workers=1).fit(frame(partitioned), batch_size=16, callbacks=[Threads()], verbose=0)

    assert cores_per_host(spark) == 4
    assert (tmp_path / "threads-0").read_text() == str(min(4, usable_cores()))


def test_with_dynamic_allocation_the_number_of_workers_must_be_known_and_tasks_must_hold_executors(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, dynamic = executors._conf, {"spark.dynamicAllocation.enabled": "true"}

    def conf(session: Any, key: str) -> str | None:
        return dynamic.get(key) or asked(session, key)

    monkeypatch.setattr(executors, "_conf", conf)
    assert not executors.is_dynamic(spark)  # Spark does not heed it on "local[4]"
    dynamic["spark.master"] = "spark://somewhere:7077"

    with pytest.raises(
        ConfigError, match=r"(?s)dynamicAllocation.enabled=true.*Hint.*spark\.executor\.instances"
    ):
        executors.resolve_workers(spark, 2, RunSettings(), detached=True)
    with pytest.raises(ConfigError, match=r"(?s)barrier stage.*SPARK-24942.*rendezvous"):
        engine.start(
            Job(
                ranks=equal_ranks("tests.unit.gang_targets:echo", 1),
                settings=RunSettings(rendezvous="workers"),
            ),
            spark=spark,
        )

    # Tasks make Spark start executors: no slots are needed beforehand.
    assert executors.resolve_workers(spark, 7, RunSettings()) == 7
    with pytest.raises(ConfigError, match=r"no limit of executors.*\n.*pass workers="):
        executors.resolve_workers(spark, None, RunSettings())
    limits = {"spark.dynamicAllocation.maxExecutors": "3", "spark.executor.cores": "2"}
    monkeypatch.setattr(executors, "_conf", lambda session, key: limits.get(key) or conf(session, key))
    assert executors.resolve_workers(spark, None, RunSettings()) == 6
    with pytest.raises(ConfigError, match=r"workers=7 but .* 6 tasks side by side"):
        executors.resolve_workers(spark, 7, RunSettings())


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"spark.master": "spark://somewhere:7077", "spark.cores.max": "5"}, 5),
        (
            {
                "spark.master": "spark://somewhere:7077", "spark.cores.max": "7",
                "spark.executor.cores": "3", "spark.task.cpus": "2",
            },
            2,
        ),
        ({"spark.master": "yarn", "spark.executor.instances": "3", "spark.executor.cores": "2"}, 6),
        ({"spark.master": "k8s://https://somewhere"}, 2),
        ({"spark.master": "local-cluster[2, 3, 1024]"}, 6),
        ({}, 4),
    ],
)  # fmt: skip
def test_more_workers_than_an_application_can_ever_run_are_refused_at_once(
    spark: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], most: int
) -> None:
    asked = executors._conf
    monkeypatch.setattr(executors, "_conf", lambda session, key: settings.get(key) or asked(session, key))

    with pytest.raises(ConfigError, match=rf"workers=9 but .* can run {most} tasks side by side"):
        executors.resolve_workers(spark, 9, RunSettings(start_timeout_s=86400))
