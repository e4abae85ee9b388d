"""Clusters on Spark's executors: two slots, two nodes, and jobs that feed them all the same."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from kindler import cluster
from kindler.errors import ConfigError, DataError, StartTimeoutError, WorkerLostError
from tests.cluster import programs
from tests.conftest import eventually_none, workers


def start(spark: Any, program: Any, args: Any = None, nodes: int = 2, **options: Any) -> cluster.Cluster:
    return cluster.run(
        program, args, nodes, **{"spark": spark, "input_mode": "spark", "framework": None, **options}
    )


def test_rows_of_any_partitions_are_fed_once_to_nodes_that_hold_no_slot(spark: Any) -> None:
    with start(spark, programs.add_up, 7) as running:
        running.train(spark.range(0, 1000, 1, 10).withColumnRenamed("id", "x"), epochs=2)
        running.train(spark.range(0, 1000, 1, 7).where("id % 250 = 3").withColumnRenamed("id", "x"))
        running.train(spark.range(0).withColumnRenamed("id", "x"))
        running.train(spark.sparkContext.parallelize([(n,) for n in range(100)], 3))
    kept = 3 + 253 + 503 + 753

    assert sum(rows for rows, _, _ in running.return_values) == 2104
    assert sum(total for _, total, _ in running.return_values) == 2 * sum(range(1000)) + kept + sum(
        range(100)
    )


def test_an_inference_has_one_result_for_each_row_and_keeps_all_columns(spark: Any) -> None:
    rows = spark.range(0, 1000, 1, 10).withColumn("name", F.concat(F.lit("n"), "id"))
    with start(spark, programs.square) as running:
        squared = running.inference(rows).toPandas().sort_values("id")
        declared = running.inference(rows, "square double", columns=["id"])
        assert declared.schema.simpleString() == "struct<id:bigint,name:string,square:double>"
        assert declared.agg(F.sum("square")).first()[0] == sum(n * n for n in range(1000))
        assert sorted(running.inference(spark.sparkContext.parallelize(range(9), 2)).collect()) == [
            n * n for n in range(9)
        ]
        with pytest.raises(ConfigError, match="'name'"):
            running.inference(rows, "name string")

    assert squared["id"].tolist() == list(range(1000))
    assert squared["result"].tolist() == [n * n for n in range(1000)]
    assert squared["name"].tolist() == [f"n{n}" for n in range(1000)]


def test_a_program_that_answers_too_little_is_the_error_of_the_cluster(spark: Any) -> None:
    running = start(spark, programs.too_few_results)
    rows = running.inference(spark.range(0, 100, 1, 2), "result long")
    with pytest.raises(DataError, match="6 results for a batch of 7 rows"):
        collect_within(running, rows)


def collect_within(running: cluster.Cluster, rows: Any) -> None:
    with running:
        rows.collect()


class RowsOfTheDead:
    """Rows that come when node 0 is gone: it failed, or returned, before anybody could connect to it."""

    def __init__(self, place: Path, how: str) -> None:
        self.place, self.how = place, how

    def __call__(self, rows: Any) -> Any:
        process = Path("/proc") / (self.place / "pid-0").read_text()
        (self.place / "told").write_text(self.how)
        (self.place / "told").rename(self.place / "go")
        while process.exists():
            pass
        yield from rows


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("on purpose", "LookupError: I fail: on purpose"),
        ("kill", "ended by SIGKILL"),
        ("return", "the program of node 0 has returned"),
    ],
)
def test_a_task_that_finds_its_node_gone_fails_with_the_reason_for_that(
    spark: Any, tmp_path: Path, how: str, told: str
) -> None:
    running = start(spark, programs.fail_when_told, str(tmp_path), nodes=1)
    rows = spark.sparkContext.parallelize(range(9), 1).mapPartitions(RowsOfTheDead(tmp_path, how))
    with pytest.raises(Exception, match=told):
        running.inference(rows).collect()
    if how == "return":
        running.shutdown()
    else:
        with pytest.raises((LookupError, WorkerLostError), match=told.removeprefix("LookupError: ")):
            running.shutdown()


def test_terminate_stops_the_job_that_feeds(spark: Any) -> None:
    with start(spark, programs.stop_after_100) as running:
        running.train(spark.range(0, 1_000_000, 1, 200), epochs=100)
    tracker = spark.sparkContext.statusTracker()

    assert running.return_values == [100, 100]
    assert not eventually_none(tracker.getActiveJobsIds)


def test_a_node_that_is_killed_ends_the_cluster_and_leaves_the_session(spark: Any) -> None:
    running = start(spark, programs.fail, "kill")
    with pytest.raises(WorkerLostError, match="SIGKILL"):
        running.train(spark.range(0, 1_000_000, 1, 50))

    assert not eventually_none(workers)
    assert spark.range(3).count() == 3


def test_too_few_slots_are_an_error_at_once_and_busy_ones_after_the_time_to_start(spark: Any) -> None:
    with pytest.raises(ConfigError, match="workers=3 but"):
        start(spark, programs.whoami, nodes=3)
    busy = threading.Thread(
        target=lambda: spark.sparkContext.parallelize(range(2), 2).foreach(lambda _: time.sleep(4))
    )
    busy.start()
    while len(spark.sparkContext.statusTracker().getActiveStageIds()) == 0:
        pass
    try:
        with pytest.raises(StartTimeoutError, match="chief 0, worker 0"):
            start(spark, programs.wait_for_nothing, start_timeout_s=1)
    finally:
        busy.join()


def test_a_stream_that_is_restarted_trains_every_micro_batch_once(spark: Any, tmp_path: Path) -> None:
    source, models = tmp_path / "source", str(tmp_path / "models")
    for number in range(4):
        spark.range(number * 10, number * 10 + 10, 1, 1).selectExpr("id as x").coalesce(1).write.parquet(
            str(source / f"part={number}")
        )
    stream = spark.readStream.schema("x long").option("maxFilesPerTrigger", "1").parquet(f"{source}/*")
    options: dict[str, Any] = {"checkpoint": str(tmp_path / "offsets"), "availableNow": True}

    running = start(spark, programs.learn_from_stream, (models, 2), nodes=1)
    query = running.train_stream(stream, **options)
    with pytest.raises(RuntimeError, match="the power is gone"):
        running.wait()
    query.stop()
    with start(spark, programs.learn_from_stream, (models, None), nodes=1) as running:
        running.train_stream(stream, **options).awaitTermination()
    total, *seen = running.return_values[0]

    assert total == sum(range(40))
    assert seen == [2, 3]
