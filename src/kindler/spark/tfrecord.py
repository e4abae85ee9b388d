"""Spark DataFrames as TFRecord files, written and read by the tasks, on classic and Connect sessions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Literal

import cloudpickle
import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import PySparkTypeError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from kindler.data.paths import absolute
from kindler.data.tfrecord import (
    Paths,
    Plan,
    ReadOptions,
    check_types,
    chosen,
    part_name,
    plan,
    staged,
    write_rows,
)
from kindler.errors import ConfigError, DataError, KindlerError
from kindler.spark.frames import arrow_types, column
from kindler.spark.tasks import at_files
from kindler.spark.versions import to_arrow
from kindler_tfrecord import SchemaLike

_SUCCESS = "_SUCCESS"  # as Spark marks a folder that is whole


def write_frame(
    frame: DataFrame,
    path: str,
    *,
    compression: Literal["gzip"] | None = None,
    overwrite: bool = False,
    columns: Sequence[str] | None = None,
) -> list[str]:
    """One file per partition, none for an empty one; see `kindler.tfrecord.write`."""
    part_name(0, compression)
    spark = frame.sparkSession
    if frame.isStreaming:
        raise ConfigError(
            "a streaming DataFrame cannot be written as TFRecord files.\nHint: write its"
            " batches with foreachBatch."
        )
    names = chosen(frame.columns, columns)
    _check_types(frame, names)
    place = staged(absolute(path), folder=True, overwrite=overwrite)
    at_files(spark, place.begin)
    try:
        # Spark resolves the columns of `mapInArrow` by name, where a dot would mean a field.
        plain = frame.select(*[column(name).alias(f"c{i}") for i, name in enumerate(names)])
        work = partial(_write, place.beside, tuple(names), compression)
        reports = _collected(plain.mapInArrow(work, "number int, file string, error binary"))
        at_files(spark, partial(_finish, place))
    finally:
        with contextlib.suppress(Exception):  # what went wrong before is the news
            at_files(spark, place.discard)
    return [f"{place.path}/{file}" for _, file in reports]


def scan_frame(
    spark: SparkSession, path: Paths, schema: SchemaLike | None, options: ReadOptions
) -> DataFrame:
    """See `kindler.tfrecord.scan`."""
    paths = [path] if isinstance(path, str | os.PathLike) else path
    places = [absolute(one) for one in paths]  # a task has another working folder
    planned: Plan = at_files(spark, lambda: plan(places, schema, **options))
    planned = replace(planned, schema=pa.schema([f.with_type(_plain(f.type)) for f in planned.schema]))
    try:
        kinds = from_arrow_schema(planned.schema)
    except PySparkTypeError as exc:
        raise ConfigError(f"Spark has no type for a column of {planned.schema}: {exc}") from exc
    work = partial(_read, planned, to_arrow_schema(kinds))
    count = len(planned.files)
    return spark.range(0, count, 1, count).mapInArrow(work, kinds)


def _write(
    folder: str,
    names: Sequence[str],
    compression: Literal["gzip"] | None,
    rows: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Runs in a task: one partition to one file."""
    context = TaskContext.get()
    assert context is not None, "this runs in a task"
    number = context.partitionId()
    first = next((batch for batch in rows if batch.num_rows), None)
    if first is None:
        return
    name = part_name(number, compression)
    # Two attempts at one partition may run at once: a file takes its name when it is whole.
    place = staged(f"{folder}/{name}", folder=False, overwrite=True)
    named = (batch.rename_columns(list(names)) for batch in chain([first], rows))
    try:
        write_rows(named, place.beside, compression, where=lambda row: f"{row} of partition {number}")
        place.commit()
    except DataError as error:
        # Reported and not raised: Spark has nothing to try again and no stack to print.
        yield _report(number, name, error)
    else:
        yield _report(number, name)
    finally:
        place.discard()


def _read(planned: Plan, sent: pa.Schema, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs in a task: one file to one partition."""
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            for rows in planned.batches([planned.files[number]]):
                yield rows.cast(sent)


def _report(number: int, file: str, error: KindlerError | None = None) -> pa.RecordBatch:
    columns = [[number], [file], [None if error is None else cloudpickle.dumps(error)]]
    arrays = [pa.array(c, t) for c, t in zip(columns, (pa.int32(), pa.string(), pa.binary()), strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=["number", "file", "error"])


def _collected(frame: DataFrame) -> list[tuple[int, str]]:
    reports = sorted(to_arrow(frame).to_pylist(), key=lambda row: row["number"])
    for row in reports:
        if row["error"] is not None:
            error: KindlerError = cloudpickle.loads(row["error"])
            raise error
    return [(row["number"], row["file"]) for row in reports]


def _finish(place: staged) -> None:
    write_rows([], f"{place.beside}/{_SUCCESS}", None)
    place.commit()


def _check_types(frame: DataFrame, names: Sequence[str]) -> None:
    types = arrow_types(frame)
    for name in names:
        if types[name] is None:
            raise DataError(f"Spark has no Arrow type for {frame.schema[name].dataType}.", column=name)
    check_types(pa.schema([(name, types[name]) for name in names]))


def _plain(kind: pa.DataType) -> pa.DataType:
    """Spark has neither lists of a fixed length nor tensors."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return pa.list_(kind.value_type)
    if pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(kind.value_type)
    return kind
