"""Model outputs as Arrow columns, without copying, and in the form of the input data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from kindler.errors import ConfigError


def to_arrow(array: np.ndarray[Any, Any]) -> pa.Array:
    """(n,) becomes a plain column, (n, a) lists, (n, a, b) lists of lists; objects are text.

    >>> to_arrow(np.arange(8, dtype="int32").reshape(2, 2, 2)).to_pylist()
    [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    """
    if array.dtype == object:
        made = pa.array(array.tolist())
        empty = pa.types.is_list(made.type) and pa.types.is_null(made.type.value_type)
        return made.cast(pa.list_(pa.string())) if empty else made
    column = _plain(np.ascontiguousarray(array.astype(_storable(array.dtype), copy=False)).reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        lists, width = int(np.prod(array.shape[:axis])), array.shape[axis]
        offsets = np.arange(lists + 1, dtype=np.int32) * np.int32(width)
        column = pa.ListArray.from_arrays(_plain(offsets), column)
    return column


def like(data: Any, outputs: dict[str, np.ndarray[Any, Any]], *, named: bool = False) -> Any:
    if isinstance(data, dict):
        refuse_taken(outputs, data)
        return {**data, **outputs}
    if isinstance(data, pa.RecordBatch | pa.Table):
        refuse_taken(outputs, data.schema.names)
        table = pa.Table.from_batches([data]) if isinstance(data, pa.RecordBatch) else data
        for name, output in outputs.items():
            table = table.append_column(name, to_arrow(output))
        return table
    if hasattr(data, "assign"):
        refuse_taken(outputs, data.columns)
        return data.assign(**{n: o if o.ndim == 1 else list(o) for n, o in outputs.items()})
    if named:
        return dict(outputs)
    arrays = list(outputs.values())
    return arrays[0] if len(arrays) == 1 else arrays


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
