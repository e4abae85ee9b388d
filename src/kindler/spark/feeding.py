"""Spark jobs that feed cluster nodes: each task pushes its partition's rows, or has them answered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from kindler.errors import ConfigError
from kindler.spark.engine import small_batches
from kindler.spark.frames import frame_error
from kindler.spark.versions import add_tag, interrupt_tag, to_arrow

if TYPE_CHECKING:
    from kindler.cluster.feeder import Feeder

_STAGE_ATTEMPTS = 1000


def is_rdd(data: Any) -> bool:
    # Not of the object: a Connect DataFrame has a column of any name.
    return type(data).__module__.startswith("pyspark.") and hasattr(type(data), "mapPartitionsWithIndex")


def session_of(context: Any) -> SparkSession:
    return SparkSession(context)


def push(spark: SparkSession, data: Any, feeder: Feeder, tag: str) -> None:
    """Feed a frame or an RDD; `stop` finds the job by its tag."""
    try:
        if is_rdd(data):
            data.context.addJobTag(tag)
            data.mapPartitions(partial(_push_items, replace(feeder, items=True))).collect()
        else:
            add_tag(spark, tag)
            with small_batches(spark):
                to_arrow(data.mapInArrow(partial(_push, feeder), "rows long"))
    except BaseException as exc:  # noqa: BLE001 - what is not the frame's own fault is raised as it is
        raise frame_error(exc, [] if is_rdd(data) else [(data, data.columns)]) from None


def stop(spark: SparkSession, data: Any, tag: str) -> None:
    if is_rdd(data):
        data.context.cancelJobsWithTag(tag)
    else:
        interrupt_tag(spark, tag)


def answered(data: Any, feeder: Feeder) -> Any:
    """A frame with the columns of the results; of an RDD, the results alone."""
    if is_rdd(data):
        return data.mapPartitions(partial(_infer, replace(feeder, items=True)))
    assert feeder.fields is not None
    added = from_arrow_schema(feeder.fields)
    return data.mapInArrow(partial(_infer, feeder), StructType([*data.schema.fields, *added.fields]))


def result_schema(schema: Any) -> pa.Schema:
    kind = schema if isinstance(schema, StructType) else StructType.fromDDL(schema)
    if not isinstance(kind, StructType):
        raise ConfigError(f'schema={schema!r}: must name the columns of the results, as in "label int".')
    return to_arrow_schema(kind)


def _place() -> dict[str, int]:
    context = TaskContext.get()
    assert context is not None
    stage = getattr(context, "stageAttemptNumber", lambda: 0)()
    attempt = int(stage) * _STAGE_ATTEMPTS + context.attemptNumber()
    return {"partition": context.partitionId(), "attempt": attempt}


def _push(feeder: Feeder, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    rows = next(_push_items(feeder, batches))
    yield pa.RecordBatch.from_pydict({"rows": pa.array([rows], pa.int64())})


def _push_items(feeder: Feeder, items: Iterator[Any]) -> Iterator[int]:
    yield feeder.push(items, **_place())


def _infer(feeder: Feeder, rows: Iterator[Any]) -> Iterator[Any]:
    yield from feeder.infer(rows, **_place())
