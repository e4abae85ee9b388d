"""Spark DataFrames in a store: each task writes or reads one blob, and no row passes the driver. Executors
must reach the blobs under the same URL as the driver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.errors import PySparkTypeError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from kindler.errors import ConfigError
from kindler.spark.frames import arrow_schema, column
from kindler.spark.session import running
from kindler.spark.versions import to_arrow
from kindler.store.blobs import Blobs, open_blobs
from kindler.store.files import sha256_of, staging_folder


def write_blobs(frame: DataFrame, url: str) -> tuple[pa.Schema, tuple[tuple[str, int, int], ...]]:
    """One Parquet blob per partition; empty ones write none, unless all are empty.

    Returns the schema, and SHA-256, bytes and rows of each blob, in the order of the rows.
    """
    if frame.isStreaming:
        raise ConfigError(
            "a streaming DataFrame cannot be stored.\nHint: store its batches with foreachBatch."
        )
    if url.startswith("memory:"):
        raise ConfigError("Spark's tasks cannot reach a store in memory.\nHint: use a folder or a database.")
    schema = arrow_schema(frame.schema)
    # Spark resolves the columns of `mapInArrow` by name, where a dot would mean a field.
    plain = frame.select(*[column(name).alias(f"c{i}") for i, name in enumerate(frame.columns)])
    task = partial(_write, url, schema)
    reports = to_arrow(plain.mapInArrow(task, "number int, sha256 string, size long, rows long"))
    parts = reports.sort_by("number").to_pylist() or [_written(iter(()), schema, open_blobs(url))]
    return schema, tuple((part["sha256"], part["size"], part["rows"]) for part in parts)


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
    sent = pa.schema([pa.field(name, _plain(schema.field(name).type)) for name in columns])
    try:
        kinds = from_arrow_schema(sent)
    except PySparkTypeError as exc:
        raise ConfigError(f"Spark has no type for a column of {sent}: {exc}") from exc
    task = partial(_read, url, tuple(hashes), schema, sent, filter)
    return session.range(0, len(hashes), 1, len(hashes)).mapInArrow(task, kinds)


def _write(url: str, schema: pa.Schema, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    assert context is not None, "this runs in a task"
    first = next((batch for batch in rows if batch.num_rows), None)
    if first is None:
        return
    report = _written(chain([first], rows), schema, open_blobs(url))
    yield pa.RecordBatch.from_pylist(
        [{"number": context.partitionId(), **report}],
        pa.schema({"number": pa.int32(), "sha256": pa.string(), "size": pa.int64(), "rows": pa.int64()}),
    )


def _read(
    url: str,
    hashes: tuple[str, ...],
    schema: pa.Schema,
    sent: pa.Schema,
    filter_: Any,
    numbers: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    blobs = open_blobs(url)
    for number in (number for batch in numbers for number in batch.column(0).to_pylist()):
        with staging_folder(blobs.stage) as folder:
            part = folder / "part.parquet"
            blobs.get(hashes[number], part)
            rows = ds.dataset(str(part), schema=schema, format="parquet")
            for batch in rows.to_batches(columns=sent.names, filter=filter_):
                if batch.num_rows:
                    yield batch.cast(sent)


def _written(rows: Iterator[pa.RecordBatch], schema: pa.Schema, blobs: Blobs) -> dict[str, Any]:
    with staging_folder(blobs.stage) as folder:
        path, count = folder / "part.parquet", 0
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for batch in rows:
                named = pa.RecordBatch.from_arrays(batch.columns, names=schema.names)
                writer.write_batch(named.cast(schema))
                count += batch.num_rows
        sha256 = sha256_of(path)
        blobs.put(path, sha256)
        return {"sha256": sha256, "size": path.stat().st_size, "rows": count}


def _plain(kind: pa.DataType) -> pa.DataType:
    """Spark has no dictionaries, no lists of a fixed length, and only microseconds."""
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(kind.value_type)
    return kind
