"""Spark DataFrames in a store: each task writes or reads one blob, and no row passes the driver. Executors
must reach the blobs under the same URL as the driver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.errors import PySparkTypeError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from kindler.errors import ConfigError, DataError
from kindler.spark.frames import arrow_types, column
from kindler.spark.session import running
from kindler.spark.versions import to_arrow
from kindler.store import staging
from kindler.store.blobs import Blobs, open_blobs
from kindler.store.hashing import sha256_of


@dataclass(frozen=True, slots=True)
class Wrote:
    schema: pa.Schema
    parts: tuple[tuple[str, int, int], ...]  # SHA-256, bytes and rows of each blob, in the order of the rows


def write_blobs(frame: DataFrame, url: str) -> Wrote:
    """One Parquet blob per partition; empty ones write none, unless all are empty."""
    if frame.isStreaming:
        raise ConfigError(
            "a streaming DataFrame cannot be stored.\nHint: store its batches with foreachBatch."
        )
    if url.startswith("memory:"):
        raise ConfigError("Spark's tasks cannot reach a store in memory.\nHint: use a folder or a database.")
    schema = _schema_of(frame)
    # Spark resolves the columns of `mapInArrow` by name, where a dot would mean a field.
    plain = frame.select(*[column(name).alias(f"c{i}") for i, name in enumerate(frame.columns)])
    reports = plain.mapInArrow(
        _Write(url=url, schema=schema), "number int, sha256 string, size long, rows long"
    )
    parts = sorted(to_arrow(reports).to_pylist(), key=lambda row: row["number"])
    if not parts:
        parts = [{"number": 0, **_written(iter(()), schema, open_blobs(url))}]
    return Wrote(schema, tuple((part["sha256"], part["size"], part["rows"]) for part in parts))


def read_blobs(
    spark: SparkSession | None,
    url: str,
    hashes: Sequence[str],
    *,
    schema: pa.Schema,
    columns: Sequence[str],
    filter: Any = None,  # noqa: A002
) -> DataFrame:
    """Lazy, one partition per blob, which its task verifies. `filter` is a pyarrow expression."""
    session = spark or running()
    if session is None:
        raise ConfigError(
            "there is no Spark session.\nHint: call kindler.init(), or pass as_='pandas' or as_='arrow'."
        )
    sent = pa.schema([_plain_field(schema.field(name)) for name in columns])
    try:
        kinds = from_arrow_schema(sent)
    except PySparkTypeError as exc:
        raise ConfigError(f"Spark has no type for a column of {sent}: {exc}") from exc
    work = _Read(url, tuple(hashes), schema, tuple(columns), sent, filter)
    return session.range(0, len(hashes), 1, len(hashes)).mapInArrow(work, kinds)


@dataclass(frozen=True, kw_only=True)
class _Write:
    url: str
    schema: pa.Schema

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None, "this runs in a task"
        first = next((batch for batch in rows if batch.num_rows), None)
        if first is None:
            return
        blobs = open_blobs(self.url)
        reports = _written(chain([first], rows), self.schema, blobs)
        yield pa.RecordBatch.from_pylist(
            [{"number": context.partitionId(), **reports}],
            pa.schema({"number": pa.int32(), "sha256": pa.string(), "size": pa.int64(), "rows": pa.int64()}),
        )


@dataclass(frozen=True)
class _Read:
    url: str
    hashes: tuple[str, ...]
    schema: pa.Schema
    columns: tuple[str, ...]
    sent: pa.Schema
    filter: Any

    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        blobs = open_blobs(self.url)
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                with staging.folder(blobs.stage) as folder:
                    part = folder / "part.parquet"
                    blobs.get(self.hashes[number], part)
                    yield from self._rows(part)

    def _rows(self, part: Path) -> Iterator[pa.RecordBatch]:
        rows = ds.dataset(str(part), schema=self.schema, format="parquet")
        for batch in rows.to_batches(columns=list(self.columns), filter=self.filter):
            if batch.num_rows:
                yield batch.cast(self.sent)


def _written(rows: Iterator[pa.RecordBatch], schema: pa.Schema, blobs: Blobs) -> dict[str, Any]:
    with staging.folder(blobs.stage) as folder:
        path, count = folder / "part.parquet", 0
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for batch in rows:
                named = pa.RecordBatch.from_arrays(batch.columns, names=schema.names)
                writer.write_batch(named.cast(schema))
                count += batch.num_rows
        sha256 = sha256_of(path)
        blobs.put(path, sha256)
        return {"sha256": sha256, "size": path.stat().st_size, "rows": count}


def _schema_of(frame: DataFrame) -> pa.Schema:
    types = arrow_types(frame)
    for name, kind in types.items():
        if kind is None:
            raise DataError(f"Spark has no Arrow type for {frame.schema[name].dataType}.", column=name)
    return pa.schema([(name, types[name]) for name in frame.columns])


def _plain_field(field: pa.Field) -> pa.Field:
    """Spark has no dictionaries, no lists of a fixed length, and only microseconds."""
    return field.with_type(_plain(field.type)).with_nullable(True)


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(kind.value_type)
    return kind
