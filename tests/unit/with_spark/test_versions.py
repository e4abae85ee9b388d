"""Every private name of pyspark and py4j that Kindler uses is there in the installed release."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kindler.spark import versions

pytestmark = pytest.mark.spark


def test_what_the_session_knows_of_its_jvm(spark: Any) -> None:
    context = spark.sparkContext

    assert versions.active_context() is context
    assert versions.has_gateway()
    assert context._gateway.proc.poll() is None
    assert (versions.spark_home() / "jars").is_dir()
    assert versions.temporary_folder(context).is_dir()
    assert versions.java_context(context).hadoopConfiguration().get("fs.defaultFS") == "file:///"


def test_a_launch_of_the_jvm_can_be_watched() -> None:
    import pyspark.java_gateway as java_gateway

    launched: list[subprocess.Popen[bytes]] = []
    with versions.noting_jvms(launched):
        process = java_gateway.Popen(["true"])  # type: ignore[attr-defined]
    assert launched == [process]
    assert process.wait() == 0
    assert java_gateway.Popen is subprocess.Popen  # type: ignore[attr-defined]


def test_the_scheduler_and_the_status_store_answer(spark: Any) -> None:
    (executor,) = versions.executor_summaries(spark)

    assert versions.concurrent_tasks(spark) == executor.totalCores() == 4
    assert executor.id() == "driver"
    assert ":" in executor.hostPort()
    assert not executor.executorLogs().get("stdout").isDefined()
    assert versions.decommissioned(spark) == []
    spark.range(8).count()
    job = spark.sparkContext.statusTracker().getJobIdsForGroup(None)[0]
    stage = spark.sparkContext.statusTracker().getJobInfo(job).stageIds[0]
    data = versions.stage_data(spark.sparkContext, stage)
    counts = (data.numActiveTasks(), data.numCompleteTasks(), data.numTasks())
    assert all(count >= 0 for count in counts)
    assert (data.shuffleWriteRecords(), data.shuffleWriteBytes()) >= (0, 0)


def test_one_partition_of_a_frame_can_be_computed_by_a_job_of_its_own(spark: Any) -> None:
    rows = spark.range(0, 6, 1, 3).rdd

    assert [tuple(row) for row in versions.one_partition(rows, 1)] == [(2,), (3,)]


def test_the_scheduler_of_a_cluster_can_be_asked_to_decommission_a_host(spark: Any) -> None:
    name = "org.apache.spark.scheduler.cluster.CoarseGrainedSchedulerBackend"
    methods = spark._jvm.java.lang.Class.forName(name).getMethods()

    assert "decommissionExecutorsOnHost" in {method.getName() for method in methods}


def test_a_plan_shows_the_files_it_scans(spark: Any, tmp_path: Path) -> None:
    spark.range(3).write.parquet(str(tmp_path / "rows"))
    frame = spark.read.parquet(str(tmp_path / "rows"))
    plan = versions.optimized_plan(frame)

    assert plan.nodeName() == "LogicalRelation"
    assert plan.output().mkString("\n").startswith("id#")
    assert plan.children().isEmpty()
    relation = plan.relation()
    assert relation.getClass().getSimpleName() == "HadoopFsRelation"
    assert relation.fileFormat().getClass().getSimpleName() == "ParquetFileFormat"
    assert relation.location().getClass().getSimpleName() == "InMemoryFileIndex"
    assert "isDirectory=false; length=" in relation.location().listFiles(
        plan.children(), plan.children()
    ).mkString("\n")
    assert "path" in relation.options().keySet().mkString("\n").split("\n")
    assert '"id"' in relation.dataSchema().json()


def test_undocumented_modules_have_what_is_imported_from_them(spark: Any) -> None:
    from pyspark.sql.connect.dataframe import DataFrame as ConnectFrame
    from pyspark.sql.connect.plan import LocalRelation
    from pyspark.sql.pandas import types

    kind = types.from_arrow_type(pa.float32())
    assert types.to_arrow_type(kind) == pa.float32()
    schema = types.from_arrow_schema(pa.schema({"x": pa.int64()}))
    assert types.to_arrow_schema(schema).names == ["x"]
    table = pa.table({"x": [1, 2]})
    assert hasattr(ConnectFrame, "_explain_string")
    assert LocalRelation(table, schema=schema.json())
    assert versions.to_arrow(versions.from_arrow(spark, table)).column("x").to_pylist() == [1, 2]
