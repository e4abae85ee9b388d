"""Data of the driver's own as Arrow tables: pandas, Arrow, arrays, dicts of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from kindler.errors import DataError


def table_of(data: Any) -> pa.Table | None:
    """The data as a table; None where it is a sequence of other objects.

    An array is a column "x", and a pair of arrays are "x" and "y".
    """
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        return _without_dictionaries(data)
    if type(data).__module__.partition(".")[0] == "pandas" and hasattr(data, "columns"):
        return _without_dictionaries(pa.Table.from_pandas(data, preserve_index=False))
    if isinstance(data, np.ndarray):
        return _of_arrays({"x": data})
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, np.ndarray) for part in data):
        return _of_arrays({"x": data[0], "y": data[1]})
    if isinstance(data, Mapping):
        return _of_arrays({str(name): np.asarray(values) for name, values in data.items()})
    return None


def like(data: Any, table: pa.Table) -> Any:
    """Results in the form of the data: a pandas DataFrame for one, else an Arrow table."""
    return table.to_pandas() if type(data).__module__.partition(".")[0] == "pandas" else table


def _of_arrays(arrays: Mapping[str, np.ndarray[Any, Any]]) -> pa.Table:
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        raise DataError(f"arrays of one data set have the same length; received {sizes}.")
    return pa.table({name: _column(array) for name, array in arrays.items()})


def _column(array: np.ndarray[Any, Any]) -> pa.Array:
    if array.ndim <= 1:
        return pa.array(array)
    inner = _column(np.ascontiguousarray(array).reshape(-1, *array.shape[2:]))
    return pa.FixedSizeListArray.from_arrays(inner, array.shape[1])


def _without_dictionaries(table: pa.Table) -> pa.Table:
    """Categories as their values: a block has no room for a dictionary."""
    for number, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(number, field.name, table.column(number).cast(field.type.value_type))
    return table
