"""The Spark home of shards: a DataFrame whose rows are pieces of shards, as bytes.

    shard long     which shard
    source long    in an exchange, which shard the piece comes from
    part int       which piece of it, counted from 0
    kind string    see `kindler.data.shards.codec`; "error" where the user's code raised
    about binary   what the shard is, on one of its parts
    payload binary an Arrow stream, or a stretch of a pickle

Made and read by `mapInArrow` alone, so that classic sessions and Spark Connect run the same code. A task has
the parts of a shard one after the other, in order. SQL on frames is in `shard_frames`.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField, StructType

from kindler.data.shards import frames, rows
from kindler.data.shards.codec import Info, Packed, from_chunks, from_table, pack, stream, to_chunks, unpack
from kindler.data.shards.home import Cut, Work, shard_error, unsendable
from kindler.engine.worker import describe
from kindler.errors import DataError, WorkerLost

__all__ = ["SparkShards", "artifact_path", "frame_of_table", "spark_schema"]

_SCHEMA = "shard long, source long, part int, kind string, about binary, payload binary"
_ARROW = pa.schema(
    {
        "shard": pa.int64(),
        "source": pa.int64(),
        "part": pa.int32(),
        "kind": pa.string(),
        "about": pa.binary(),
        "payload": pa.binary(),
    }
)
_CHUNK_BYTES = 16 << 20
_BOUNDED = (4, 1)  # from this version on Spark bounds the bytes of an Arrow batch
_ROWS_CONF = "spark.sql.execution.arrow.maxRecordsPerBatch"
_ROWS_PER_BATCH = 64

# Frames to unpersist: a finalizer must not speak to the JVM, because it may interrupt somebody who does.
_released: deque[DataFrame] = deque()


class SparkShards:
    """Shards of the Spark home; see `kindler.data.shards.home.Held`.

    Args:
        frame: The pieces; see this module's table.
        infos: What each shard is, if that is known; otherwise the frame is computed to find out.
    """

    home = "spark"

    def __init__(self, frame: DataFrame, infos: Sequence[Info] | None = None) -> None:
        _unpersist_released()
        self.frame = frame.persist()
        self._finalizer = weakref.finalize(self, _released.append, self.frame)
        self._finalizer.atexit = False
        self._kept = True
        self._numbers: list[int] = list(range(len(infos or ())))
        try:
            self._infos = tuple(infos) if infos is not None else self._look()
        except BaseException:
            self.free()
            raise

    @staticmethod
    def of(spark: SparkSession, shards: Iterable[Packed]) -> SparkShards:
        """Send shards of this process to Spark."""
        infos: list[Info] = []
        batches: list[pa.RecordBatch] = []
        for number, packed in enumerate(shards):
            infos.append(packed.info)
            batches += _pieces_of(number, packed)
        frame = spark.createDataFrame(pa.Table.from_batches(batches, _ARROW))
        return SparkShards(_placed(frame, len(infos)), infos)

    @staticmethod
    def of_frame(frame: DataFrame, count: int | None = None) -> SparkShards:
        """A DataFrame's partitions as shards; partitions without rows are left out."""
        schema = frames.plain_schema(_arrow_schema(frame))
        # Spark finds the columns of `mapInArrow` by name, where a dot would mean a field: none has a name.
        unnamed = frame.toDF(*[f"c{i}" for i in range(len(frame.columns))])
        if count is not None:
            unnamed = unnamed.repartition(count)
        made = SparkShards(unnamed.mapInArrow(_Encode(schema=schema), _SCHEMA))
        return made if made.infos else SparkShards.of(frame.sparkSession, [from_table(schema.empty_table())])

    @staticmethod
    def of_rdd(spark: SparkSession, rdd: Any) -> SparkShards:
        """The elements of an RDD as shards; classic sessions only."""
        pieces = rdd.zipWithIndex().flatMap(_rows_of_element)
        return SparkShards(spark.createDataFrame(pieces, _SCHEMA))

    @property
    def infos(self) -> tuple[Info, ...]:
        return self._infos

    @property
    def is_kept(self) -> bool:
        return self._kept

    def load(self, numbers: Sequence[int]) -> Iterator[Packed]:
        if not numbers:
            return iter(())
        wanted = [self._numbers[number] for number in numbers]
        frame = self.frame
        if len(set(wanted)) < len(self._numbers):
            frame = frame.where(F.col("shard").isin(wanted))
        with _modest_batches(frame.sparkSession):
            table = frame.toArrow()
        # Spark's tasks end in any order and are put in theirs; parts of a shard are in order within a task.
        found = {shard: packed for shard, _, packed in _shards_in(table.to_batches())}
        return iter([found[number] for number in wanted])

    def mapped(self, work: Work, *, by_user: bool = False) -> SparkShards:
        task = _Map(work=work, numbers=self._index())
        if not by_user:
            return self._again(self.frame.mapInArrow(task, _SCHEMA))
        try:
            return self._again(self.frame.mapInArrow(task, _SCHEMA))
        except pickle.PicklingError as exc:
            raise unsendable(exc) from exc
        except (PySparkException, Py4JJavaError) as exc:
            # What the function raises comes as a value: here its process went away, or its executor.
            told = str(exc).strip().partition("\n")[0][:300]
            raise WorkerLost(f"Spark gave up on its task ({told})", rank=None, host="the cluster") from None

    def exchanged(self, cut: Cut, count: int) -> SparkShards:
        pieces = self.frame.mapInArrow(_Cut(cut=cut, numbers=self._index()), _SCHEMA)
        return self._again(_placed(pieces, count).mapInArrow(_join, _SCHEMA))

    def zipped(self, other: SparkShards) -> SparkShards:
        sides = [
            side._normal().withColumn("source", F.lit(number).cast("long"))
            for number, side in enumerate((self, other))
        ]
        pieces = _placed(sides[0].union(sides[1]), len(self.infos))
        return self._again(pieces.mapInArrow(_zip, _SCHEMA))

    def sorted_rows(self, names: Sequence[str], ascending: Sequence[bool]) -> SparkShards:
        from kindler.spark import shard_frames as sql

        return self._of_sql(sql.sorted_rows(self.native(), names, ascending, self._wanted()))

    def distinct(self) -> SparkShards:
        from kindler.spark import shard_frames as sql

        return self._of_sql(sql.distinct(self.native(), self._wanted()))

    def grouped(self, keys: Sequence[str], wanted: Sequence[frames.Aggregate], *, join: bool) -> SparkShards:
        from kindler.spark import shard_frames as sql

        return self._of_sql(sql.grouped(self.native(), keys, wanted, join=join, count=self._wanted()))

    def merged(self, right: SparkShards, how: str, names: frames.MergeNames) -> SparkShards:
        from kindler.spark import shard_frames as sql

        count = max(len(self.infos), 1)
        return self._of_sql(sql.merged(self.native(), right.native(), how, names, count))

    def described(self, names: Sequence[str]) -> Any:
        from kindler.spark import shard_frames as sql

        return sql.described(self.native(), names)

    def schema(self) -> pa.Schema:
        return frames.schema_of(self.infos)

    def spark_frame(self) -> DataFrame:
        schema = self.schema()
        return self.frame.mapInArrow(_Native(schema=schema), spark_schema(schema))

    def native(self) -> DataFrame:
        """The rows of frames as a Spark DataFrame, each with its place in the collection."""
        from kindler.spark.shard_frames import ROW

        schema = self.schema()
        numbered = schema.append(pa.field(ROW, pa.int64()))
        return self.frame.mapInArrow(
            _Native(schema=schema, numbered=True, numbers=self._index()), spark_schema(numbered)
        )

    def packed_frame(self, names: dict[str, str]) -> DataFrame:
        """A row of arrays is a row, and each array's part of it one binary cell.

        Args:
            names: Column of the shards' tables -> column of the frame.
        """
        schema = pa.schema({new: pa.binary() for new in names.values()})
        return self.frame.mapInArrow(_Unpacked(names=names), spark_schema(schema))

    def keep(self) -> None:
        if not self._kept:
            self.frame.persist()
            self._kept = True

    def free(self) -> None:
        self._kept = False
        with contextlib.suppress(PySparkException, OSError):
            self.frame.unpersist()

    def _look(self) -> tuple[Info, ...]:
        """Compute the shards, all of them: what they are is found out on the way."""
        with _modest_batches(self.frame.sparkSession):
            told = self.frame.where(F.col("about").isNotNull()).select("shard", "about").toArrow()
        pairs = zip(told.column(0).to_pylist(), told.column(1).to_pylist(), strict=True)
        found = {shard: Info.from_bytes(about) for shard, about in pairs}
        self._numbers = sorted(found)
        for number, shard in enumerate(self._numbers):
            if found[shard].kind == "error":
                raise shard_error(json.loads(found[shard].name), number)
        return tuple(found[shard] for shard in self._numbers)

    def _index(self) -> dict[int, int] | None:
        """Number in the frame -> number of the shard, where they differ."""
        if self._numbers == list(range(len(self._numbers))):
            return None
        return {shard: number for number, shard in enumerate(self._numbers)}

    def _normal(self) -> DataFrame:
        index = self._index()
        return (
            self.frame if index is None else self.frame.mapInArrow(_Map(work=_same, numbers=index), _SCHEMA)
        )

    def _wanted(self) -> int:
        return max(1, min(len(self.infos), sum(info.rows for info in self.infos)))

    def _again(self, frame: DataFrame) -> SparkShards:
        return SparkShards(frame)

    def _of_sql(self, frame: DataFrame) -> SparkShards:
        return SparkShards.of_frame(frame)


def spark_schema(schema: pa.Schema) -> StructType:
    """A plain schema as Spark has it; timestamps without a zone stay without one."""
    return StructType(
        [StructField(f.name, from_arrow_type(_not_null(f.type), prefer_timestamp_ntz=True)) for f in schema]
    )


def frame_of_table(spark: SparkSession, table: pa.Table) -> DataFrame:
    """A plain table of this process as a Spark DataFrame."""
    return spark.createDataFrame(_without_nulls(table), spark_schema(table.schema))


def artifact_path(name: str) -> str:
    """Where a file that was sent with `addArtifact` is on this executor."""
    from pyspark import SparkFiles

    return str(SparkFiles.get(name))


def _not_null(kind: pa.DataType) -> pa.DataType:
    """A column without any value is a column of strings: Parquet and others take no other."""
    return pa.string() if pa.types.is_null(kind) else kind


def _without_nulls(table: pa.Table) -> pa.Table:
    return table.cast(pa.schema([pa.field(f.name, _not_null(f.type)) for f in table.schema]))


def _arrow_schema(frame: DataFrame) -> pa.Schema:
    from kindler.spark.frames import arrow_types

    types = arrow_types(frame)
    for field in frame.schema.fields:
        if types[field.name] is None:
            raise DataError(f"{field.dataType.simpleString()} has no form in Arrow.", column=field.name)
    return pa.schema([pa.field(name, types[name]) for name in frame.columns])


def _placed(frame: DataFrame, count: int) -> DataFrame:
    """The parts of a shard in one partition, in order; a partition for each shard where Spark can."""
    if hasattr(frame, "repartitionById"):
        spread = frame.repartitionById(count, F.col("shard").cast("int"))
    else:
        spread = frame.repartitionByRange(count, "shard")  # computes the frame twice, but keeps the order
    return spread.sortWithinPartitions("shard", "source", "part")


def _unpersist_released() -> None:
    while _released:
        with contextlib.suppress(Exception):  # the session may be gone, and the data with it
            _released.popleft().unpersist()


@contextlib.contextmanager
def _modest_batches(spark: SparkSession) -> Iterator[None]:
    """Keep Arrow batches below 2 GB on a Spark that counts their rows only."""
    if tuple(int(part) for part in spark.version.split(".")[:2]) >= _BOUNDED:
        yield
        return
    before = spark.conf.get(_ROWS_CONF)
    spark.conf.set(_ROWS_CONF, str(_ROWS_PER_BATCH))
    try:
        yield
    finally:
        spark.conf.set(_ROWS_CONF, str(before))


def _pieces_of(shard: int, packed: Packed, source: int = 0) -> Iterator[pa.RecordBatch]:
    for part, chunk in enumerate(to_chunks(packed)):
        about = packed.info.to_bytes() if part == 0 else None
        yield _piece(shard, source, part, packed.info.kind, about, chunk)


def _piece(
    shard: int, source: int, part: int, kind: str, about: bytes | None, chunk: bytes
) -> pa.RecordBatch:
    values = (shard, source, part, kind, about, chunk)
    arrays = [pa.array([value], field.type) for value, field in zip(values, _ARROW, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_ARROW)


def _shards_in(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, int, Packed]]:
    """(shard, source, what it is) out of parts that follow one another."""
    cells = (cell for batch in batches for cell in _cells(batch))
    for (shard, source), parts in groupby(cells, key=lambda cell: cell[0]):
        abouts: list[bytes] = []
        chunks = []
        for _, about, chunk in parts:
            abouts += [about] if about is not None else []
            chunks.append(chunk)
        yield shard, source, from_chunks(Info.from_bytes(abouts[0]), chunks)


def _cells(batch: pa.RecordBatch) -> Iterator[tuple[tuple[int, int], bytes | None, Any]]:
    shards, sources = batch.column("shard").to_pylist(), batch.column("source").to_pylist()
    abouts, payloads = batch.column("about").to_pylist(), batch.column("payload")
    for i, about in enumerate(abouts):
        yield (shards[i], sources[i]), about, payloads[i].as_buffer()


def _failed(exc: BaseException) -> Packed:
    said = {**describe(exc), "host": socket.gethostname()}
    return Packed(Info("error", 0, name=json.dumps(said, default=str)), data=b"")


def _same(number: int, packed: Packed) -> Packed:
    return packed


@dataclass(frozen=True, kw_only=True)
class _Map:
    """Each shard made into another. The user's code fails as a value: Spark has no stack to print."""

    work: Work
    numbers: dict[int, int] | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for shard, _, packed in _shards_in(batches):
            number = shard if self.numbers is None else self.numbers[shard]
            try:
                made = self.work(number, packed)
            except Exception as exc:  # noqa: BLE001 - the edge of the task: raised again on the driver
                made = _failed(exc)
            yield from _pieces_of(number, made)


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """Pieces of shards for other shards."""

    cut: Cut
    numbers: dict[int, int] | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for shard, _, packed in _shards_in(batches):
            number = shard if self.numbers is None else self.numbers[shard]
            try:
                for target, piece in self.cut(number, packed):
                    yield from _pieces_of(target, piece, number)
            except Exception as exc:  # noqa: BLE001 - the edge of the task: raised again on the driver
                yield from _pieces_of(0, _failed(exc), number)


def _join(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for shard, pieces in groupby(_shards_in(batches), key=lambda found: found[0]):
        yield from _pieces_of(shard, _combined([packed for _, _, packed in pieces], pairs=False))


def _zip(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for shard, pieces in groupby(_shards_in(batches), key=lambda found: found[0]):
        yield from _pieces_of(shard, _combined([packed for _, _, packed in pieces], pairs=True))


def _combined(pieces: Sequence[Packed], *, pairs: bool) -> Packed:
    for piece in pieces:
        if piece.info.kind == "error":
            return piece
    try:
        return pack(tuple(unpack(piece) for piece in pieces)) if pairs else rows.joined(pieces)
    except Exception as exc:  # noqa: BLE001 - the edge of the task: raised again on the driver
        return _failed(exc)


@dataclass(frozen=True, kw_only=True)
class _Native:
    """Frames as rows; with numbers, each row's place in the collection is appended."""

    schema: pa.Schema
    numbered: bool = False
    numbers: dict[int, int] | None = None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from kindler.spark.shard_frames import ROW, place

        for shard, _, packed in _shards_in(batches):
            table = _without_nulls(frames.conform(frames.plain(packed), self.schema))
            number = shard if self.numbers is None else self.numbers[shard]
            if self.numbered:
                table = table.append_column(ROW, place(number, table.num_rows))
            yield from table.to_batches()


@dataclass(frozen=True, kw_only=True)
class _Unpacked:
    """Arrays as rows of binary cells."""

    names: dict[str, str]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _, _, packed in _shards_in(batches):
            columns = {new: packed.table.column(old).cast(pa.binary()) for old, new in self.names.items()}
            yield from pa.table(columns).to_batches()


@dataclass(frozen=True, kw_only=True)
class _Encode:
    """The rows of a partition as one shard, written while they come."""

    schema: pa.Schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        shard = context.partitionId() if context is not None else 0
        count, part, chunk = 0, 0, b""
        for table in _gathered(batches, self.schema):
            if part:
                yield _piece(shard, 0, part - 1, "frame", None, chunk)
            chunk = stream(table)
            count, part = count + table.num_rows, part + 1
        if part:
            about = Info("frame", count, name="DataFrame", schema=self.schema).to_bytes()
            yield _piece(shard, 0, part - 1, "frame", about, chunk)


def _gathered(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """Tables of about a chunk's size, of the schema's types and names."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            waiting.append(batch)
            size += batch.nbytes
        if size > _CHUNK_BYTES // 2:
            yield _renamed(waiting, schema)
            waiting, size = [], 0
    if waiting:
        yield _renamed(waiting, schema)


def _renamed(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    table = pa.Table.from_batches(batches).combine_chunks()
    return table.rename_columns(schema.names).cast(schema)


def _rows_of_element(pair: tuple[Any, int]) -> Iterator[tuple[Any, ...]]:
    thing, number = pair
    packed = pack(thing)
    for part, chunk in enumerate(to_chunks(packed)):
        about = bytearray(packed.info.to_bytes()) if part == 0 else None
        yield number, 0, part, packed.info.kind, about, bytearray(chunk)
