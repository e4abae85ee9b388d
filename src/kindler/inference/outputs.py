"""Model outputs as Arrow columns, without copying, and in the form of the input data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from kindler.errors import ConfigError


def to_arrow(array: np.ndarray[Any, Any], kind: pa.DataType | None = None) -> pa.Array:
    """(n,) becomes a plain column, (n, a) lists, (n, a, b) lists of lists; objects are of `kind`, or text.

    >>> to_arrow(np.arange(8, dtype="int32").reshape(2, 2, 2)).to_pylist()
    [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]

    Rows that are masked become nulls.
    """
    if isinstance(array, np.ma.MaskedArray):
        rows = [None if missing else i for i, missing in enumerate(missing_rows(array))]
        return to_arrow(array.data, kind).take(pa.array(rows, pa.int64()))
    if array.dtype == object:
        made = pa.array(array.tolist(), kind)
        if pa.types.is_null(made.type):
            return made.cast(pa.string())
        empty = pa.types.is_list(made.type) and pa.types.is_null(made.type.value_type)
        return made.cast(pa.list_(pa.string())) if empty else made
    column = _plain(np.ascontiguousarray(array.astype(_storable(array.dtype), copy=False)).reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        lists, width = int(np.prod(array.shape[:axis])), array.shape[axis]
        offsets = np.arange(lists + 1, dtype=np.int32) * np.int32(width)
        column = pa.ListArray.from_arrays(_plain(offsets), column)
    return column


def to_columns(
    kinds: Sequence[pa.DataType] | None, outputs: Sequence[np.ndarray[Any, Any]]
) -> list[pa.Array]:
    """`kinds` None finds each out from its values."""
    return [to_arrow(*pair) for pair in zip(outputs, kinds or [None] * len(outputs), strict=True)]


def missing_rows(array: np.ma.MaskedArray[Any, Any]) -> list[bool]:
    mask = np.ma.getmaskarray(array)
    return [bool(row.any()) for row in mask]


def concatenated(parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """A batch's outputs after another's; masked rows stay so."""
    masked = any(isinstance(part, np.ma.MaskedArray) for part in parts)
    join: Any = np.ma.concatenate if masked else np.concatenate
    whole: np.ndarray[Any, Any] = join(parts)
    return whole


def filled(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Masked rows as NaN, or as None among objects where the values are no floats."""
    if not isinstance(array, np.ma.MaskedArray):
        return array
    if array.dtype.kind == "f":
        return array.filled(np.nan)
    rows = np.empty(len(array), object)
    rows[:] = list(array.data)
    rows[missing_rows(array)] = None
    return rows


def like(
    data: Any,
    outputs: dict[str, np.ndarray[Any, Any]],
    *,
    named: bool = False,
    kinds: Mapping[str, pa.DataType] | None = None,
) -> Any:
    if isinstance(data, dict):
        refuse_taken(outputs, data)
        return {**data, **{name: filled(output) for name, output in outputs.items()}}
    if isinstance(data, pa.RecordBatch | pa.Table):
        refuse_taken(outputs, data.schema.names)
        table = pa.Table.from_batches([data]) if isinstance(data, pa.RecordBatch) else data
        for name, output in outputs.items():
            table = table.append_column(name, to_arrow(output, (kinds or {}).get(name)))
        return table
    if hasattr(data, "assign"):
        refuse_taken(outputs, data.columns)
        return data.assign(**{n: filled(o) if o.ndim == 1 else _rows(o) for n, o in outputs.items()})
    outputs = {name: filled(output) for name, output in outputs.items()}
    if named:
        return outputs
    arrays = list(outputs.values())
    return arrays[0] if len(arrays) == 1 else arrays


def _rows(array: np.ndarray[Any, Any]) -> list[Any]:
    missing = missing_rows(array) if isinstance(array, np.ma.MaskedArray) else [False] * len(array)
    return [None if gone else row for row, gone in zip(np.asarray(array), missing, strict=True)]


def refuse_taken(names: Any, existing: Any) -> None:
    taken = [name for name in names if name in list(existing)]
    if taken:
        raise ConfigError(
            f"the data already has {taken}, which predictions would overwrite.\n"
            "Hint: choose other names with predict(..., output_cols=[...])."
        )


def _plain(values: np.ndarray[Any, Any]) -> pa.Array:
    """Avoids `pa.array` for numbers, which imports pandas in each worker."""
    if values.dtype.kind not in "iuf":
        return pa.array(values)
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _storable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Spark has no half floats and no unsigned integers; the next wider type holds them exactly."""
    wider = {"float16": "float32", "uint8": "int16", "uint16": "int32", "uint32": "int64"}
    storable: np.dtype[Any] = np.dtype(wider.get(dtype.name, dtype.name))
    return storable
