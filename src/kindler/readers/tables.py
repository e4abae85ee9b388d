"""Parquet and TFRecord files as pandas DataFrames; of Parquet files workers read ranges of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kindler.data import parquet, tables
from kindler.data.parquet import ParquetFiles
from kindler.data.shards import frames
from kindler.data.shards.codec import Packed, from_table, pack, unpack
from kindler.data.shards.pytree import even_bounds
from kindler.data.tfrecord import Plan, ReadOptions, plan
from kindler.errors import ConfigError, DataError
from kindler.readers.files import Paths, listed, on_engine, refuse_keys
from kindler.xshards import XShards, backends
from kindler_tfrecord import SchemaLike

if TYPE_CHECKING:
    from typing_extensions import Unpack


def read_parquet(
    file_path: Paths | tables.Table,
    columns: Sequence[str] | None = None,
    schema: pa.Schema | Mapping[str, Any] | None = None,
    *,
    engine: str = "auto",
    num_shards: int | None = None,
) -> XShards:
    """Read Parquet files, or a Delta or Iceberg table, into shards of pandas DataFrames.

    Args:
        file_path: A file, a folder, a glob, a URI, or a list of them; or a `Table`.
        columns: The columns to read, in this order. Default: all.
        schema: Types to read columns as: a pyarrow.Schema, a pyspark StructType, or a dict of pyarrow types
            or their names.
            Default: those of the files; where they differ, the wider one.
        engine: "local", "spark", or "auto": Spark if a session is running, else local. Every worker must find
            the files under the same path.
        num_shards: The number of shards to distribute the rows over, evenly; one large file is then read
            by several workers. Default: one per file that has rows.

    Returns:
        Shards in the order of the files. Types are limited to those of Spark: categories become their values,
        nanoseconds microseconds, and integers with missing values pandas' `Int64`.

    Raises:
        ConfigError: No file was found, or the schema names an unknown column.
        DataError: A file is not Parquet, lacks a column, or its types are incompatible with the others.
    """
    where = backends.choose(engine)
    if isinstance(file_path, tables.Table):
        files = tables.inspect(file_path)
    else:
        files = on_engine(where, partial(_inspect, listed(file_path)))
    wanted = _wanted(files, _names(columns), schema)
    sizes = [sum(groups) for groups in files.row_groups]
    if num_shards is None:
        bounds = [(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0)) if start < stop]
    else:
        bounds = even_bounds(files.rows, num_shards)
    ranges = backends.put(map(pack, bounds), where)
    return XShards(ranges.mapped(partial(_read_rows, files, wanted), by_user=True))


def read_tfrecord(
    file_path: Paths,
    schema: SchemaLike | None = None,
    *,
    engine: str = "auto",
    num_shards: int | None = None,
    **options: Unpack[ReadOptions],
) -> XShards:
    """Read TFRecord files of tf.train.Example into shards of pandas DataFrames, one per file.

    Args:
        file_path: A file, a folder, a glob, a URI, or a list of them.
        schema: As for `kindler.tfrecord.read`; inferred from a sample by default.
        engine: "local", "spark", or "auto": Spark if a session is running, else local. Every worker must find
            the files under the same path.
        num_shards: The number of shards to distribute the rows over, evenly. Default: one per file.
        options: `columns`, `compression`, `verify`, `binary` and `sample_rows` of `kindler.tfrecord.read`.

    Returns:
        Shards in the order of the files; lists and tensors become one-dimensional arrays.

    Raises:
        ConfigError: There is no such file or column.
        DataError: A file is damaged, or a record does not match the schema.
    """
    where = backends.choose(engine)
    planned: Plan = on_engine(where, partial(plan, listed(file_path), schema, **options))
    files = backends.put(map(pack, planned.files), where)
    shards = XShards(files.mapped(partial(_read_records, planned), by_user=True))
    return shards if num_shards is None else shards.repartition(num_shards)


def _read_rows(files: ParquetFiles, schema: pa.Schema, number: int, packed: Packed) -> Packed:
    start, stop = unpack(packed)
    parts = [schema.empty_table()]
    try:
        for batch in parquet.scan(files, schema.names, start, stop):
            # Without the notes that came with the file: they could name cells to unpickle.
            table = pa.Table.from_batches([batch]).replace_schema_metadata(None)
            parts.append(frames.conform(frames.plain(from_table(table)), schema))
    except (pa.ArrowException, OSError) as exc:
        raise DataError(f"{exc}", row=files.locate(start)) from exc
    return from_table(pa.concat_tables(parts).combine_chunks())


def _inspect(given: list[str]) -> ParquetFiles:
    files = tables.inspect(given)
    refuse_keys(given, [file for number, file in enumerate(files.files) if files.view(number) is None])
    return files


def _names(columns: Sequence[str] | None) -> list[str] | None:
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r} must be a list.\nHint: columns=[{columns!r}].")
    if columns is not None and not columns:
        raise ConfigError("columns=[]: must have at least one name.")
    return None if columns is None else list(columns)


def _wanted(files: ParquetFiles, columns: list[str] | None, schema: Any) -> pa.Schema:
    """Checks that every file has the columns."""
    names = files.schemas[0].names if columns is None else columns
    for file, file_schema in zip(files.files, files.schemas, strict=True):
        lacks = [name for name in names if name not in file_schema.names]
        more = [name for name in file_schema.names if name not in names] if columns is None else []
        if lacks or more:
            difference = f"lacks {lacks}" if lacks else f"also has {more}"
            raise DataError(
                f"{file} {difference}; it has {file_schema.names}; expected {names}.\n"
                "Hint: columns=[...] reads the columns that all files share."
            )
    common = frames.together(
        [frames.plain_schema(file_schema, names) for file_schema in dict.fromkeys(files.schemas)]
    )
    types = _types(schema, names)
    return pa.schema([pa.field(name, types.get(name, common.field(name).type)) for name in names])


def _types(schema: Any, names: Sequence[str]) -> dict[str, pa.DataType]:
    if schema is None:
        return {}
    types = {name: _type(name, kind) for name, kind in _pairs(schema)}
    frames.check_columns(list(types), names, "read_parquet(schema=...)")
    return dict(zip(types, frames.plain_schema(pa.schema(types)).types, strict=True))


def _pairs(schema: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(schema, Mapping):
        return schema.items()
    if type(schema).__name__ == "StructType" and type(schema).__module__ == "pyspark.sql.types":
        from kindler.spark.frames import arrow_schema

        schema = arrow_schema(schema)
    if isinstance(schema, pa.Schema):
        return zip(schema.names, schema.types, strict=True)
    raise ConfigError(
        f"read_parquet(schema=...): {type(schema).__module__}.{type(schema).__qualname__} is not a schema.\n"
        "Hint: pass a pyarrow.Schema, a pyspark StructType, or a dict of pyarrow types or their names:"
        " {'price': 'float32'}."
    )


def _type(name: str, kind: Any) -> pa.DataType:
    if isinstance(kind, pa.DataType):
        return kind
    try:
        return pa.type_for_alias(kind) if isinstance(kind, str) else pa.from_numpy_dtype(kind)
    except (ValueError, TypeError, pa.ArrowException) as exc:
        raise ConfigError(f"schema={{{name!r}: {kind!r}}}: unknown Arrow type.") from exc


def _read_records(planned: Plan, number: int, packed: Packed) -> Packed:
    table = pa.Table.from_batches(planned.batches([unpack(packed)]), planned.schema)
    return from_table(frames.plain(from_table(table.replace_schema_metadata(None))))
