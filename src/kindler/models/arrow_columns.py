"""Columns of Arrow tables as the arrays that models take, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from kindler.data.columns import is_list
from kindler.errors import DataError, first_line
from kindler.models.signature import Array, Arrays

_TEXTS = (
    *("string", "large_string", "string_view"),
    *("binary", "large_binary", "binary_view", "fixed_size_binary"),
)


def as_table(data: Any) -> pa.Table:
    """A table of pandas or Arrow, or a series of pandas, as an Arrow table."""
    if hasattr(data, "to_frame"):
        data = data.to_frame()
    if hasattr(data, "iloc"):
        data = pa.Table.from_pandas(data.rename(columns=str), preserve_index=False)
    if not isinstance(data, pa.Table):
        raise DataError(f"expected a table, received a {type(data).__qualname__}.")
    return data


def columns_of(table: pa.Table) -> Arrays:
    """The columns of a table, by name."""
    try:
        if len(set(table.column_names)) != table.num_columns:
            raise DataError("the table has duplicate column names.")
        return {name: _values(table.column(name).combine_chunks(), name) for name in table.column_names}
    except (DataError, MemoryError):  # Arrow's own too little memory is one of its exceptions
        raise
    except (pa.ArrowException, ValueError) as exc:
        raise DataError(f"the table cannot be read: {first_line(exc)}.") from exc


def as_column(array: Array) -> pa.Array:
    """An array of rows as a column: rows of several numbers as tensors of fixed shape."""
    if array.ndim == 1 or array.dtype.kind in "ObUS" or 0 in array.shape:
        return pa.array(array.tolist() if array.ndim > 1 or array.dtype.kind in "OUS" else array)
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(array))


def _values(column: Any, name: str) -> Array:
    """Numbers and lists of numbers without a detour through Python."""
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    shape: tuple[int, ...] | None = None
    if isinstance(column, pa.ExtensionArray):
        shape = tuple(getattr(column.type, "shape", ())) or None
        column = column.storage
    dims: list[int] = [len(column)]
    while is_list(column.type):
        if column.null_count:
            raise DataError(f"the column {name!r} has nulls.")
        fixed = pa.types.is_fixed_size_list(column.type)
        lengths = {column.type.list_size} if fixed else set(column.value_lengths().to_pylist())
        if len(lengths) > 1:
            raise DataError(f"the rows of the column {name!r} have different lengths.")
        dims.append(int(next(iter(lengths), 0)))
        column = column.flatten()
    values: Array = _flat(column, name).reshape(dims if shape is None else [dims[0], *shape])
    return values


def _flat(column: Any, name: str) -> Array:
    if isinstance(column, pa.DictionaryArray):
        if is_text(column.type.value_type):
            texts = np.array([*column.dictionary.to_pylist(), None], dtype=object)
            chosen: Array = texts[column.indices.fill_null(len(texts) - 1).to_numpy(zero_copy_only=False)]
            return chosen
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        if column.null_count and not pa.types.is_floating(kind):
            raise DataError(f"the column {name!r} has nulls.")
        return np.asarray(column.to_numpy(zero_copy_only=False))
    if pa.types.is_decimal(kind):
        return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False))
    if is_text(kind) or pa.types.is_temporal(kind):
        return np.array(column.to_pylist(), dtype=object)
    reason = "has nulls only" if pa.types.is_null(kind) else f"is of type {kind}, which no model accepts"
    raise DataError(f"the column {name!r} {reason}.")


def is_text(kind: pa.DataType) -> bool:
    """Whether values are texts or bytes."""
    return str(kind).partition("[")[0] in _TEXTS
