"""Tables in a body: JSON of several forms, CSV, Arrow and Parquet, as numpy columns; and answers as Arrow."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from kindler.serve.problems import Problem
from kindler.serve.protocols.values import as_tensor
from kindler.serve.requests import Answer
from kindler.serve.signature import Array

__all__ = [
    "ARROW",
    "PARQUET",
    "columns_of",
    "from_arrow",
    "from_csv",
    "from_parquet",
    "from_records",
    "table_columns",
    "to_arrow",
]

ARROW = "application/vnd.apache.arrow.stream"
PARQUET = "application/vnd.apache.parquet"


def from_records(records: Sequence[Any]) -> dict[str, Array]:
    """A list of objects with the same names."""
    if not records or not isinstance(records[0], dict):
        raise Problem(400, "the data must be a list of objects that is not empty.")
    names = list(records[0])
    for i, record in enumerate(records):
        if not isinstance(record, dict) or record.keys() != records[0].keys():
            raise Problem(400, f"row {i} does not have the columns {names} of the first.")
    return {name: as_tensor([record[name] for record in records], f"the column {name!r}") for name in names}


def columns_of(data: Mapping[str, Any]) -> dict[str, Array]:
    """An object of lists, or of objects that are lists by row number."""
    found = {}
    for name, values in data.items():
        listed = list(values.values()) if isinstance(values, dict) else values
        if not isinstance(listed, list):
            raise Problem(400, f"the column {name!r} must be a list.")
        found[str(name)] = as_tensor(listed, f"the column {name!r}")
    return found


def from_csv(body: bytes) -> dict[str, Array]:
    """A table with a line of names."""
    try:
        return table_columns(pyarrow.csv.read_csv(io.BytesIO(body)))
    except (pa.ArrowException, ValueError) as exc:
        raise Problem(400, f"the body is no CSV: {_first(exc)}.") from exc


def from_parquet(body: bytes) -> dict[str, Array]:
    """A Parquet file."""
    try:
        return table_columns(pq.read_table(io.BytesIO(body)))
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise Problem(400, f"the body is no Parquet file: {_first(exc)}.") from exc


def from_arrow(body: bytes) -> dict[str, Array]:
    """A stream of Arrow record batches."""
    try:
        with pa.ipc.open_stream(body) as stream:
            table = stream.read_all()
        table.validate(full=True)
        return table_columns(table)
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise Problem(400, f"the body is no Arrow stream: {_first(exc)}.") from exc


def to_arrow(answer: Answer) -> bytes:
    """The outputs as columns of an Arrow stream; what has several dimensions as tensors of fixed shape."""
    arrays, names = [], []
    for name, array in answer.outputs.items():
        if not array.ndim or len(array) != answer.rows:
            raise Problem(400, f"the output {name!r} does not have one row for each row of the request.")
        names.append(name)
        arrays.append(_arrow(array))
    table = pa.Table.from_arrays(arrays, names=names)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _arrow(array: Array) -> pa.Array:
    if array.ndim == 1:
        return pa.array(array.tolist() if array.dtype.kind == "O" else array)
    if array.dtype.kind in "Ob" or 0 in array.shape:
        return pa.array(array.tolist())
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(array))


def table_columns(table: pa.Table) -> dict[str, Array]:
    """The columns of an Arrow table."""
    if len(set(table.column_names)) != table.num_columns:
        raise Problem(400, "the table has columns with the same name.")
    return {name: _values(table.column(name).combine_chunks(), name) for name in table.column_names}


def _values(column: Any, name: str) -> Array:
    """Numbers and lists of numbers without a detour through Python."""
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    shape: tuple[int, ...] | None = None
    if isinstance(column, pa.ExtensionArray):
        shape = tuple(getattr(column.type, "shape", ())) or None
        column = column.storage
    dims: list[int] = [len(column)]
    while pa.types.is_fixed_size_list(column.type) or _is_list(column.type):
        if column.null_count:
            raise Problem(400, f"the column {name!r} has nulls.")
        lengths = (
            {column.type.list_size}
            if pa.types.is_fixed_size_list(column.type)
            else set(column.value_lengths().to_pylist())
        )
        if len(lengths) > 1:
            raise Problem(400, f"the rows of the column {name!r} differ in length.")
        dims.append(int(next(iter(lengths), 0)))
        column = column.flatten()
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        if column.null_count and not pa.types.is_floating(kind):
            raise Problem(400, f"the column {name!r} has nulls.")
        array = column.to_numpy(zero_copy_only=False)
    elif pa.types.is_decimal(kind):
        array = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    elif pa.types.is_nested(kind):
        raise Problem(400, f"the column {name!r} is of type {kind}, which no model takes.")
    else:
        array = np.array(column.to_pylist(), dtype=object)
    if shape is not None:
        dims = [dims[0], *shape]
    made: Array = array.reshape(dims)
    return made


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _first(exc: BaseException) -> str:
    return next(iter(str(exc).splitlines()), type(exc).__name__)[:300]
