"""Writing data of this process to TFRecord files; Spark DataFrames are handed to Spark's side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import add
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from kindler.data.arrays import is_local_data, kind, named, values
from kindler.data.paths import absolute
from kindler.data.tfrecord.encode import encode
from kindler.data.tfrecord.files import part_name, staged, written
from kindler.data.tfrecord.schema import refusal
from kindler.errors import ConfigError, DataError

# Rows are encoded so many bytes at a time, which stay in the processor's cache until they are written.
_CHUNK_BYTES = 2 << 20


def write_files(
    data: Any,
    path: str,
    *,
    compression: Literal["gzip"] | None,
    rows_per_file: int | None,
    overwrite: bool,
    columns: Sequence[str] | None,
) -> list[str]:
    """See `kindler.tfrecord.write`."""
    part_name(0, compression)
    if rows_per_file is not None and rows_per_file < 1:
        raise ConfigError(f"rows_per_file={rows_per_file}: must be at least 1.")
    path = absolute(path)
    schema, rows = _batches(data, columns)
    checked(schema)
    with staged(path, folder=rows_per_file is not None, overwrite=overwrite) as beside:
        if rows_per_file is None:
            write_rows(rows, beside, compression)
            return [path]
        names = _write_parts(rows, beside, compression, rows_per_file)
        return [f"{path}/{name}" for name in names]


def checked(schema: pa.Schema) -> None:
    """Refuse types that have no place in an Example.

    Raises:
        DataError: Names the column and what would work.
    """
    for field in schema:
        problem = refusal(field.type)
        if problem:
            raise DataError(problem, column=field.name)
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise ConfigError(f"several columns are named {twice}; names must be unique.")


def write_rows(
    batches: Iterable[pa.RecordBatch],
    file: str,
    compression: Literal["gzip"] | None,
    *,
    where: Callable[[int], int | str] = int,
) -> int:
    """Write one file.

    Args:
        batches: The rows.
        file: Where to.
        compression: How.
        where: Names a row in complaints, given its place among these rows.

    Returns:
        How many rows it has.
    """
    rows = 0
    with written(file, compression) as out:
        for batch in batches:
            for chunk in _chunks(batch):
                out.write(encode(chunk, where=lambda row, first=rows: where(first + row)).data)  # type: ignore[misc]
                rows += chunk.num_rows
    return rows


def _write_parts(
    batches: Iterator[pa.RecordBatch],
    folder: str,
    compression: Literal["gzip"] | None,
    rows_per_file: int,
) -> list[str]:
    names: list[str] = []
    row = 0
    for part in _parts(batches, rows_per_file):
        name = part_name(len(names), compression)
        row += write_rows(part, f"{folder}/{name}", compression, where=partial(add, row))
        names.append(name)
    return names


def _parts(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[list[pa.RecordBatch]]:
    held: list[pa.RecordBatch] = []
    room = rows
    for batch in batches:
        while batch.num_rows >= room:
            held.append(batch.slice(0, room))
            yield held
            batch, held, room = batch.slice(room), [], rows
        if batch.num_rows:
            held.append(batch)
            room -= batch.num_rows
    if held:
        yield held


def _chunks(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if not batch.num_rows:
        return
    step = max(_CHUNK_BYTES * batch.num_rows // max(batch.nbytes, 1), 1)
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)


def _batches(data: Any, columns: Sequence[str] | None) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The schema and the rows of data in any form."""
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r} must be a list.\nHint: columns=[{columns!r}].")
    if isinstance(data, pa.RecordBatchReader):
        chosen = _chosen(data.schema.names, columns)
        schema = pa.schema([data.schema.field(name) for name in chosen])
        return schema, (batch.select(chosen) for batch in data)
    table = _table(data, columns)
    return table.schema, iter(table.to_batches())


def _table(data: Any, columns: Sequence[str] | None) -> pa.Table:
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        return data if columns is None else data.select(_chosen(data.schema.names, columns))
    if not is_local_data(data) or isinstance(data, tuple | np.ndarray):
        raise ConfigError(
            f"data is {kind(data)}.\n"
            "Hint: pass a pyarrow Table, a pandas DataFrame, a dict of arrays, or a Spark DataFrame."
        )
    columns_by_name = named(data).columns
    arrays = {name: _column(columns_by_name[name], name) for name in _chosen(list(columns_by_name), columns)}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"columns have different lengths: {lengths}.")
    return pa.table(arrays)


def _chosen(names: Sequence[str], columns: Sequence[str] | None) -> list[str]:
    if columns is None:
        return list(names)
    missing = [name for name in columns if name not in names]
    if missing:
        raise ConfigError(f"columns={list(columns)}: {missing} are not among {list(names)}.")
    return list(columns)


def _column(column: Any, name: str) -> pa.Array | pa.ChunkedArray:
    if hasattr(column, "iloc") and str(column.dtype) == "object":
        try:
            return pa.array(column, from_pandas=True)  # None and NaN between strings are nulls
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            pass  # cells that are arrays of several axes
    array = values(column, name)
    if not isinstance(array, np.ndarray):
        return array
    if array.ndim == 1:
        return pa.array(array)
    width = int(np.prod(array.shape[1:]))
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(array).reshape(-1)), width)
