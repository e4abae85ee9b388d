"""Read and write TFRecord files of tf.train.Example, without TensorFlow.

`write` and `read` work on data in this process, `iter_batches` reads more than fits into memory, and `scan`
reads with Spark.

    in Arrow, numpy or Spark                       in the file
    bool, int8 ... uint64                          int64_list; a uint64 above 2**63 - 1 is an error
    float16, float32                               float_list
    float64                                        float_list, rounded to 32 bits
    string, binary                                 bytes_list
    lists, nested lists, tensors, rows of arrays   flattened
    null                                           the feature is left out
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from kindler.data.arrays import is_spark_frame
from kindler.data.tfrecord import (
    SAMPLE_ROWS,
    Compression,
    Paths,
    ReadOptions,
    find,
    plan,
    sampled,
    write_files,
)
from kindler.errors import ConfigError, MissingExtraError
from kindler_tfrecord import SchemaLike

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from typing_extensions import Unpack

__all__ = ["infer_schema", "iter_batches", "read", "scan", "write"]


def write(
    data: Any,
    path: str | os.PathLike[str],
    *,
    compression: Literal["gzip"] | None = None,
    rows_per_file: int | None = None,
    overwrite: bool = False,
    columns: Sequence[str] | None = None,
) -> list[str]:
    """Write rows as TFRecord files, one tf.train.Example per row.

    Files are written under a temporary name and renamed at the end: a failure leaves nothing behind, and
    existing files stay until then.

    Args:
        data: A pyarrow Table, RecordBatch or RecordBatchReader, a pandas DataFrame, a dict of arrays, or a
            Spark DataFrame, whose tasks write one file per partition.
        path: The file to write; the folder, for a Spark DataFrame or with `rows_per_file`.
        compression: "gzip" compresses whole files, as TensorFlow does.
        rows_per_file: Write a folder of files with this many rows each: part-00000.tfrecord, ...
        overwrite: Whether to replace existing files.
        columns: The columns to write, in this order. Default: all.

    Returns:
        The files, in the order of the rows.

    Raises:
        ConfigError: The path exists already, or `data` is not supported.
        DataError: An Example cannot hold a type or a value. The message names column and row.
    """
    if is_spark_frame(data):
        if rows_per_file is not None:
            raise ConfigError(
                "rows_per_file does not apply to Spark DataFrames, which are written as one"
                " file per partition.\n"
                "Hint: use frame.repartition(...)."
            )
        files: list[str] = _spark_side().write_frame(
            data, os.fspath(path), compression=compression, overwrite=overwrite, columns=columns
        )
        return files
    return write_files(
        data,
        os.fspath(path),
        compression=compression,
        rows_per_file=rows_per_file,
        overwrite=overwrite,
        columns=columns,
    )


def read(
    path: Paths,
    *,
    schema: SchemaLike | None = None,
    columns: Sequence[str] | None = None,
    compression: Compression = "auto",
    verify: bool = True,
    binary: Collection[str] = (),
    sample_rows: int | None = SAMPLE_ROWS,
) -> pa.Table:
    """Read TFRecord files into a table.

    Args:
        path: A file, a folder, a glob, a URI, or a list of them.
        schema: A pyarrow.Schema, or a dict of pyarrow types, numpy dtypes, "string", "binary" and
            (dtype, shape). Features that it does not name are left out. Default: as `infer_schema`
            finds it, and any column may hold nulls.
        columns: The columns to read, in this order. Default: all.
        compression: "gzip", None, or "auto" to detect it for each file.
        verify: Whether to check the checksums of the data; those of the lengths are always checked.
        binary: Columns to infer as binary, even if their values look like text.
        sample_rows: How many records the schema is inferred from; None for all.

    Returns:
        The rows in the order of the files. A feature that a record lacks is null.

    Raises:
        ConfigError: There is no such file or column.
        DataError: A file is damaged or not a TFRecord file, or a record does not match the schema. The
            message names file, record (from 0) and byte (of the uncompressed content).
    """
    planned = plan(path, schema, columns, compression, verify, binary, sample_rows)
    return pa.Table.from_batches(planned.batches(planned.files), planned.schema)


def iter_batches(
    path: Paths, *, schema: SchemaLike | None = None, **options: Unpack[ReadOptions]
) -> Iterator[pa.RecordBatch]:
    """Read TFRecord files batch by batch, holding only some megabytes of records in memory.

    The arguments are those of `read`, and are checked before the first batch is requested. Batch sizes are
    chosen for speed; a batch never spans two files.
    """
    planned = plan(path, schema, **options)
    return planned.batches(planned.files)


def infer_schema(
    path: Paths,
    *,
    compression: Compression = "auto",
    verify: bool = True,
    binary: Collection[str] = (),
    sample_rows: int | None = SAMPLE_ROWS,
) -> pa.Schema:
    """Infer the schema from a sample of records; columns are sorted by name.

    The arguments are those of `read`. An int64_list is int64, a float_list float32, and a bytes_list a string
    if all samples are UTF-8 text, otherwise binary. A feature with one value wherever it has any is a scalar,
    any other is a list; if all lists have one length, the field's metadata has it as "kindler.length". A
    feature that is missing or empty in some records is nullable.
    """
    return sampled(find(path), compression, verify, binary, sample_rows)


def scan(
    spark: SparkSession, path: Paths, *, schema: SchemaLike | None = None, **options: Unpack[ReadOptions]
) -> DataFrame:
    """Create a lazy Spark DataFrame of TFRecord files, read by its tasks.

    Each file is one partition, in the order of the files, and is never split: many files of some hundred
    megabytes are read faster than one large one. Every executor must find the files under the same path.
    Classic sessions and Spark Connect work alike.

    The other arguments are those of `read`. Lists of a fixed length and tensors become Spark arrays.
    """
    frame: DataFrame = _spark_side().scan_frame(spark, path, schema, options)
    return frame


def _spark_side() -> Any:
    try:
        from kindler.spark import tfrecord
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != "pyspark":
            raise
        raise MissingExtraError(what="a Spark DataFrame", package="pyspark", extra="spark") from exc
    return tfrecord
