"""Spark jobs that feed cluster nodes: each task pushes its partition's rows, or has them answered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from kindler.errors import ConfigError
from kindler.spark.engine import small_batches
from kindler.spark.frames import frame_error
from kindler.spark.versions import add_tag, interrupt_tag, to_arrow

_STAGE_ATTEMPTS = 1000


class Push(Protocol):
    """What tasks do with their rows; travels to them."""

    def push(self, batches: Iterable[pa.RecordBatch], *, partition: int, attempt: int = 0) -> int: ...
    def push_items(self, items: Iterable[Any], *, partition: int, attempt: int = 0) -> int: ...
    def infer_items(self, items: Iterable[Any], *, partition: int, attempt: int = 0) -> Iterator[Any]: ...
    def infer(
        self, batches: Iterable[pa.RecordBatch], *, partition: int, attempt: int = 0
    ) -> Iterator[pa.RecordBatch]: ...


def is_rdd(data: Any) -> bool:
    # Not of the object: a Connect DataFrame has a column of any name.
    return type(data).__module__.startswith("pyspark.") and hasattr(type(data), "mapPartitionsWithIndex")


def session_of(context: Any) -> SparkSession:
    return SparkSession(context)


class FeedJob(threading.Thread):
    """`tag` is what `stop` finds the job by; `done` is called at its end."""

    def __init__(
        self, spark: SparkSession, data: Any, push: Push, *, tag: str, done: Callable[[], None]
    ) -> None:
        super().__init__(name="kindler-feed-job", daemon=True)
        self.error: BaseException | None = None
        self._spark, self._data, self._push, self._tag, self._done = spark, data, push, tag, done

    def run(self) -> None:
        try:
            if is_rdd(self._data):
                self._data.context.addJobTag(self._tag)
                self._data.mapPartitionsWithIndex(partial(_push_items, self._push)).collect()
            else:
                add_tag(self._spark, self._tag)
                with small_batches(self._spark):
                    to_arrow(self._data.mapInArrow(partial(_push, self._push), "rows long"))
        except BaseException as exc:  # noqa: BLE001 - raised again on the thread that waits
            frames = [] if is_rdd(self._data) else [(self._data, self._data.columns)]
            self.error = frame_error(exc, frames)
        finally:
            self._done()

    def stop(self) -> None:
        if is_rdd(self._data):
            self._data.context.cancelJobsWithTag(self._tag)
        else:
            interrupt_tag(self._spark, self._tag)


def answered(frame: DataFrame, push: Push, fields: pa.Schema) -> DataFrame:
    added = from_arrow_schema(fields)
    return frame.mapInArrow(partial(_infer, push), StructType([*frame.schema.fields, *added.fields]))


def answered_items(rdd: Any, push: Push) -> Any:
    return rdd.mapPartitionsWithIndex(partial(_infer_items, push))


def result_schema(schema: Any) -> pa.Schema:
    kind = schema if isinstance(schema, StructType) else StructType.fromDDL(schema)
    if not isinstance(kind, StructType):
        raise ConfigError(f'schema={schema!r}: it names the columns of the results, as "label int".')
    return to_arrow_schema(kind)


def stream_batches(
    frame: DataFrame,
    each: Callable[[DataFrame, int], None],
    *,
    checkpoint: str | None,
    trigger: dict[str, Any],
) -> Any:
    writer = frame.writeStream.foreachBatch(each)
    if checkpoint is not None:
        writer = writer.option("checkpointLocation", checkpoint)
    return writer.trigger(**trigger).start() if trigger else writer.start()


def _place() -> dict[str, int]:
    context = TaskContext.get()
    assert context is not None
    stage = getattr(context, "stageAttemptNumber", lambda: 0)()
    attempt = int(stage) * _STAGE_ATTEMPTS + context.attemptNumber()
    return {"partition": context.partitionId(), "attempt": attempt}


def _push(push: Push, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"rows": pa.array([push.push(batches, **_place())], pa.int64())})


def _push_items(push: Push, partition: int, items: Iterator[Any]) -> Iterator[int]:
    yield push.push_items(items, **_place() | {"partition": partition})


def _infer(push: Push, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from push.infer(batches, **_place())


def _infer_items(push: Push, partition: int, items: Iterator[Any]) -> Iterator[Any]:
    yield from push.infer_items(items, **_place() | {"partition": partition})
