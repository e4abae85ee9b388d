"""The Spark engine of shards: a DataFrame whose rows are pieces of shards, as bytes.

    shard long     which shard
    source long    in an exchange, which shard the piece comes from
    part int       which piece of it, counted from 0
    kind string    see `kindler.data.shards.codec`; "error" where the user's code raised
    about binary   what the shard is, on one of its parts
    payload binary an Arrow stream, or a stretch of a pickle

Made and read by `mapInArrow` alone, so that classic sessions and Spark Connect run the same code. A task has
the parts of a shard one after the other, in order.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField, StructType

from kindler.data.shards import frames
from kindler.data.shards.backend import Cut, Query, Work, shard_error, unsendable
from kindler.data.shards.codec import Info, Packed, from_table
from kindler.errors import TrainingError, WorkerLostError
from kindler.spark import shard_frames
from kindler.spark import shard_tasks as tasks
from kindler.spark.frames import arrow_schema, of_task
from kindler.spark.session import setting
from kindler.spark.tasks import sent_task
from kindler.spark.versions import from_arrow, is_connect, parse, to_arrow

_SENT_BYTES = 64 << 20
_BOUNDED = (4, 1)  # from this version on Spark bounds the bytes of an Arrow batch
_ROWS_CONF = "spark.sql.execution.arrow.maxRecordsPerBatch"
_ROWS_PER_BATCH = 64

# Frames to unpersist: a finalizer must not speak to the JVM, because it may interrupt somebody who does.
_released: deque[DataFrame] = deque()


class SparkShards:
    """`frame` has the pieces, as in this module's table. Without `infos`, it is computed to find them."""

    engine = "spark"

    def __init__(self, frame: DataFrame, infos: Sequence[Info] | None = None) -> None:
        _unpersist_released()
        self.frame = frame.persist()
        self._finalizer = weakref.finalize(self, _released.append, self.frame)
        self._finalizer.atexit = False
        self.is_kept = True
        self._numbers: list[int] = list(range(len(infos or ())))
        try:
            self.infos = tuple(infos) if infos is not None else self._look()
        except BaseException:
            self.free()
            raise

    @staticmethod
    def of(spark: SparkSession, shards: Iterable[Packed]) -> SparkShards:
        infos: list[Info] = []

        def pieces() -> Iterator[pa.RecordBatch]:
            for number, packed in enumerate(shards):
                infos.append(packed.info)
                yield from tasks.pieces_of(number, packed)
                del packed  # before the next one is made

        # Some at a time, so that the driver holds no second copy of all. Not through Connect, which would put
        # every table of moderate size into the plan, and a plan must not be larger than a message.
        gathered = tasks.tables(pieces(), most=None if is_connect(spark) else _SENT_BYTES)
        whole = reduce(lambda one, more: one.union(more), (from_arrow(spark, table) for table in gathered))
        pa.default_memory_pool().release_unused()  # Arrow would keep the size of a few tables
        return SparkShards(_placed(whole, len(infos)), infos)

    @staticmethod
    def of_frame(frame: DataFrame, count: int | None = None) -> SparkShards:
        """Every partition with rows becomes a shard."""
        schema = frames.plain_schema(arrow_schema(frame.schema))
        # Spark finds the columns of `mapInArrow` by name, where a dot would mean a field: none has a name.
        unnamed = frame.toDF(*[f"c{i}" for i in range(len(frame.columns))])
        if count is not None:
            unnamed = unnamed.repartition(count)
        shards = SparkShards(unnamed.mapInArrow(_task(tasks.encode, schema), tasks.SCHEMA))
        return (
            shards if shards.infos else SparkShards.of(frame.sparkSession, [from_table(schema.empty_table())])
        )

    @staticmethod
    def of_rdd(spark: SparkSession, rdd: Any) -> SparkShards:
        """Classic sessions only."""
        pieces = rdd.zipWithIndex().flatMap(tasks.rows_of_element)
        return SparkShards(spark.createDataFrame(pieces, tasks.SCHEMA))

    def load(self, numbers: Sequence[int]) -> Iterator[Packed]:
        if not numbers:
            return iter(())
        wanted = [self._numbers[number] for number in numbers]
        frame = self.frame
        if len(set(wanted)) < len(self._numbers):
            frame = frame.where(F.col("shard").isin(wanted))
        with _limited_batches(frame.sparkSession):
            table = to_arrow(frame)
        # Spark's tasks end in any order and are put in theirs; parts of a shard are in order within a task.
        loaded = {shard: packed for shard, _, packed in tasks.shards_in(table.to_batches())}
        return iter([loaded[number] for number in wanted])

    @property
    def session(self) -> SparkSession:
        return self.frame.sparkSession

    def mapped(self, work: Work, *, by_user: bool = False) -> SparkShards:
        task = _task(tasks.map_shards, work, self._index())
        try:
            return SparkShards(self.frame.mapInArrow(task, tasks.SCHEMA))
        except (pickle.PicklingError, PySparkException, Py4JJavaError) as exc:
            if not by_user:
                raise
            if isinstance(exc, pickle.PicklingError):
                raise unsendable(exc) from exc
            if (message := of_task(str(exc))) is not None:
                raise TrainingError(message) from None
            # What the function raises comes as a value: here its process went away, or its executor.
            line = str(exc).strip().partition("\n")[0][:300]
            raise WorkerLostError(
                f"Spark abandoned its task ({line})", rank=None, host="the cluster"
            ) from None

    def exchanged(self, cut: Cut, count: int) -> SparkShards:
        pieces = self.frame.mapInArrow(_task(tasks.cut_shards, cut, self._index()), tasks.SCHEMA)
        return SparkShards(_placed(pieces, count).mapInArrow(_task(tasks.combine, False), tasks.SCHEMA))

    def zipped(self, other: SparkShards) -> SparkShards:
        sides = [
            side._normal().withColumn("source", F.lit(number).cast("long"))
            for number, side in enumerate((self, other))
        ]
        pieces = _placed(sides[0].union(sides[1]), len(self.infos))
        return SparkShards(pieces.mapInArrow(_task(tasks.combine, True), tasks.SCHEMA))

    def queried(self, operation: Query, *arguments: Any) -> SparkShards:
        rows = sum(info.rows for info in self.infos)
        count = len(self.infos) if operation == "merged" else min(len(self.infos), rows)
        frames_too = [value.native() if isinstance(value, SparkShards) else value for value in arguments]
        query = getattr(shard_frames, operation)
        return SparkShards.of_frame(query(self.native(), *frames_too, count=max(1, count)))

    def described(self, names: Sequence[str]) -> Any:
        return shard_frames.described(self.native(), names)

    def spark_frame(self, names: Sequence[str] | None = None) -> DataFrame:
        schema = frames.schema_of([info for info in self.infos if info.rows] or self.infos, names)
        return self.frame.mapInArrow(_task(tasks.frame_rows, schema), spark_schema(schema))

    def native(self) -> DataFrame:
        schema = frames.schema_of(self.infos)
        numbered = schema.append(pa.field(shard_frames.place_column(schema.names), pa.int64()))
        task = _task(tasks.numbered_rows, schema, self._index())
        return self.frame.mapInArrow(task, spark_schema(numbered))

    def packed_frame(self, names: Sequence[str]) -> DataFrame:
        schema = pa.schema({name: pa.binary() for name in names})
        return self.frame.mapInArrow(_task(tasks.packed_rows, tuple(names)), spark_schema(schema))

    def keep(self) -> None:
        if not self.is_kept:
            self.frame.persist()
            self.is_kept = True

    def free(self) -> None:
        self.is_kept = False
        with contextlib.suppress(PySparkException, OSError):
            self.frame.unpersist()

    def _look(self) -> tuple[Info, ...]:
        """Computes all shards on the way."""
        with _limited_batches(self.frame.sparkSession):
            table = to_arrow(self.frame.where(F.col("about").isNotNull()).select("shard", "about"))
        pairs = zip(table.column(0).to_pylist(), table.column(1).to_pylist(), strict=True)
        infos: dict[int, Info] = {shard: pickle.loads(about) for shard, about in pairs}
        self._numbers = sorted(infos)
        for number, shard in enumerate(self._numbers):
            if infos[shard].kind == "error":
                raise shard_error(json.loads(infos[shard].name), number)
        return tuple(infos[shard] for shard in self._numbers)

    def _index(self) -> dict[int, int]:
        """Number in the frame -> number of the shard."""
        return {shard: number for number, shard in enumerate(self._numbers)}

    def _normal(self) -> DataFrame:
        if self._numbers == list(range(len(self._numbers))):
            return self.frame
        return self.frame.mapInArrow(_task(tasks.map_shards, tasks.same, self._index()), tasks.SCHEMA)


def _task(function: Callable[..., Any], *arguments: Any) -> Callable[[Iterator[Any]], Iterator[Any]]:
    return sent_task(partial(function, *arguments))


def spark_schema(schema: pa.Schema) -> StructType:
    """Timestamps without a zone stay without one."""
    return StructType(
        [
            StructField(f.name, from_arrow_type(tasks.not_null(f.type), prefer_timestamp_ntz=True))
            for f in schema
        ]
    )


def frame_of_table(spark: SparkSession, table: pa.Table) -> DataFrame:
    return from_arrow(spark, tasks.without_nulls(table), spark_schema(table.schema))


def artifact_path(name: str) -> str:
    from pyspark import SparkFiles

    return str(SparkFiles.get(name))


def _placed(frame: DataFrame, count: int) -> DataFrame:
    if hasattr(frame, "repartitionById"):
        spread = frame.repartitionById(count, F.col("shard").cast("int"))
    else:
        spread = frame.repartitionByRange(count, "shard")  # computes the frame twice, but keeps the order
    return spread.sortWithinPartitions("shard", "source", "part")


def _unpersist_released() -> None:
    while _released:
        with contextlib.suppress(Exception):  # the session may be gone, and the data with it
            _released.popleft().unpersist()


def _limited_batches(spark: SparkSession) -> contextlib.AbstractContextManager[None]:
    """Keeps Arrow batches below 2 GB on a Spark that limits only their rows."""
    if parse(spark.version) >= _BOUNDED:
        return contextlib.nullcontext()
    return setting(spark, _ROWS_CONF, str(_ROWS_PER_BATCH))
