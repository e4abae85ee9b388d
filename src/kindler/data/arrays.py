"""In-memory data in any accepted form, as named columns. Values are neither converted nor checked here.
Datasets of other libraries (Hugging Face, ray) become Arrow tables; they are recognised by class name,
so their libraries are never imported."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from kindler.data.columns import Array
from kindler.data.shards.pytree import is_frame, is_series
from kindler.errors import ConfigError, DataError

_FORMS = (
    "a dict of arrays, a tuple (x, y) of arrays, {'x': ..., 'y': ...}, an array,"
    " a pandas DataFrame, a pyarrow Table or RecordBatch, a Hugging Face or ray dataset"
)


@dataclass(frozen=True, slots=True)
class Named:
    """Columns by name, and which are features and labels if the form of the data says so."""

    columns: dict[str, Any]
    features: tuple[str, ...] | None = None
    labels: tuple[str, ...] | None = None

    @property
    def types(self) -> dict[str, Any]:
        return {name: getattr(column, "type", None) for name, column in self.columns.items()}

    def called(self, features: Sequence[str] | None, labels: Sequence[str] | None) -> Named:
        """Rename generated x and y columns to the requested feature and label names."""
        new = {
            old: name
            for prefix, there, asked in (("x", self.features, features), ("y", self.labels, labels))
            if there and asked and len(there) == len(asked) and not set(asked) & set(self.columns)
            if all(re.fullmatch(rf"{prefix}\d*", name) for name in there)
            for old, name in zip(there, asked, strict=True)
        }
        return Named(
            {new.get(name, name): column for name, column in self.columns.items()},
            None if self.features is None else tuple(new.get(name, name) for name in self.features),
            None if self.labels is None else tuple(new.get(name, name) for name in self.labels),
        )


def is_spark_frame(data: Any) -> bool:
    """True for classic and Connect DataFrames; does not import pyspark."""
    return type(data).__name__ == "DataFrame" and type(data).__module__.startswith("pyspark.sql")


def is_local_data(data: Any) -> bool:
    if isinstance(data, dict):
        return bool(data)
    return (
        is_frame(data)
        or is_dataset(data)
        or isinstance(data, np.ndarray | pa.Table | pa.RecordBatch)
        or (isinstance(data, tuple) and 1 <= len(data) <= 2)
        or (isinstance(data, list) and bool(data) and all(isinstance(part, np.ndarray) for part in data))
    )


def kind(data: Any) -> str:
    if isinstance(data, dict):
        return "a dict of arrays" if data else "an empty dict"
    if isinstance(data, tuple | list):
        return f"a {type(data).__name__} of {len(data)}"
    if isinstance(data, np.ndarray):
        return f"an array of shape {data.shape}"
    for what, types in (("a pyarrow Table", pa.Table), ("a pyarrow RecordBatch", pa.RecordBatch)):
        if isinstance(data, types):
            return what
    if is_frame(data):
        return "a pandas DataFrame"
    return f"a {type(data).__module__}.{type(data).__qualname__}"


def named(data: Any) -> Named:
    """Name the columns of local data. A tuple (x, y), a list of inputs, or a dict with "x" implies
    features and labels: a single array is "x" (or "y"), several are "x0", "x1", ..., and nested dicts
    keep their own names."""
    if isinstance(data, Named):
        return data
    refuse_unusable(data)
    if not is_local_data(data):
        raise ConfigError(f"cannot use {kind(data)} as data.\nHint: pass {_FORMS}.")
    if is_dataset(data):
        data = dataset_table(data)
    if isinstance(data, pa.Table | pa.RecordBatch):
        return Named(_unique(zip(data.schema.names, data.columns, strict=True)))
    if is_frame(data):
        return Named(_unique((str(name), data.iloc[:, i]) for i, name in enumerate(data.columns)))
    if isinstance(data, np.ndarray | list):
        return _paired(data)
    if isinstance(data, tuple):
        return _paired(*data)
    if "x" in data and set(data) <= {"x", "y"}:
        return _paired(**data)
    return Named({str(name): column for name, column in data.items()})


def values(column: Any, name: str) -> Array | pa.Array | pa.ChunkedArray:
    if isinstance(column, pa.Array | pa.ChunkedArray):
        return column
    if is_series(column) and not (isinstance(column.dtype, np.dtype) and column.dtype.kind in "biufO"):
        return _arrow(column, name)
    try:
        array = np.asarray(column)
    except ValueError:  # a list of lists of different lengths: Arrow's reader will name the row
        return _arrow(list(column), name)
    if array.ndim == 0:
        raise ConfigError(
            f"column {name!r} is the single value {column!r}; expected an array with one entry per row."
        )
    return _from_objects(array, name) if array.dtype == object else array


def _paired(x: Any, y: Any = None) -> Named:
    inputs = _several("x", x)
    targets = {} if y is None else _several("y", y)
    both = sorted(inputs.keys() & targets.keys())
    if both:
        raise ConfigError(f"{both} name both inputs and targets; names must be unique.")
    return Named({**inputs, **targets}, tuple(inputs), tuple(targets) if targets else None)


def _several(prefix: str, arrays: Any) -> dict[str, Any]:
    if isinstance(arrays, Mapping):
        return {str(name): column for name, column in arrays.items()}
    many = isinstance(arrays, tuple) or (
        isinstance(arrays, list)
        and bool(arrays)
        and all(hasattr(part, "shape") and part.shape for part in arrays)
    )
    if many:
        return {f"{prefix}{i}": column for i, column in enumerate(arrays)}
    if is_frame(arrays):
        return {str(name): arrays.iloc[:, i] for i, name in enumerate(arrays.columns)}
    return {prefix: arrays}


def _unique(pairs: Any) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, column in pairs:
        if name in columns:
            raise ConfigError(f"two columns are named {name!r}; names must be unique.")
        columns[name] = column
    return columns


def _from_objects(objects: Array, name: str) -> Array | pa.Array | pa.ChunkedArray:
    first = objects.flat[0] if objects.size else None
    if isinstance(first, np.ndarray) and first.ndim > 1:
        return _stacked(objects, name)
    return _arrow(list(objects), name)


def _stacked(objects: Sequence[Any] | Array, name: str) -> Array:
    shape = objects[0].shape
    for row, value in enumerate(objects):
        if np.shape(value) != shape:
            raise DataError(
                f"has shape {np.shape(value)} where the first row has {shape}; all rows must"
                " have the same shape.",
                column=name,
                row=row,
            )
    return np.stack(list(objects))


def _arrow(column: Any, name: str) -> pa.Array | pa.ChunkedArray:
    try:
        return pa.array(column, from_pandas=is_series(column))
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as exc:
        raise DataError(f"its values do not form one column: {exc}", column=name) from exc


def is_dataset(data: Any) -> bool:
    return _is(data, "datasets", "Dataset") or _is(data, "ray", "Dataset")


def refuse_unusable(data: Any) -> None:
    if _is(data, "datasets", "DatasetDict") or _is(data, "datasets", "IterableDatasetDict"):
        names = list(data)
        raise ConfigError(
            f"data is a dict of the splits {names}.\nHint: pass one of them, as in data[{names[0]!r}]."
            if names
            else "data is an empty dict of splits."
        )
    if _is(data, "datasets", "IterableDataset"):
        raise ConfigError(
            "data is an IterableDataset, whose rows have no index.\n"
            "Hint: load it without streaming=True, or Dataset.from_generator(lambda: iter(data))."
        )
    if _is(data, "datasets", "Dataset") and data.format["type"] == "custom":
        raise ConfigError(
            "data computes its rows when they are read (set_transform), so its table holds different rows.\n"
            "Hint: apply the function with data.map(...)."
        )


def gives_arrow(data: Any) -> bool:
    return hasattr(type(data), "__arrow_c_stream__") or hasattr(type(data), "__arrow_c_array__")


def table_of(data: Any) -> pa.Table:
    """The rows of an object with `__arrow_c_stream__` or `__arrow_c_array__`."""
    try:
        table = pa.table(data)
    except (pa.ArrowException, TypeError, ValueError) as exc:
        raise ConfigError(
            f"{kind(data)} does not give named columns ({exc}).\nHint: pass a table, not one column."
        ) from exc
    return table.cast(pa.schema([field.with_type(_plain_type(field.type)) for field in table.schema]))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Views, in which some libraries keep text, as the usual types."""
    return {"string_view": pa.large_string(), "binary_view": pa.large_binary()}.get(str(kind), kind)


def dataset_table(data: Any) -> pa.Table:
    refuse_unusable(data)
    if _is(data, "ray", "Dataset"):
        return _of_ray(data)
    if data._indices is None:
        mapped: pa.Table = data.data.table
        return mapped
    picked: pa.Table = data.with_format("arrow")[:]
    return picked


def with_columns(data: Any, rows: pa.Table, added: Mapping[str, pa.Array]) -> Any:
    """Returns a dataset, or for ray a table made from `rows`: ray may reorder rows when read again."""
    if _is(data, "ray", "Dataset"):
        for name, column in added.items():
            rows = rows.append_column(name, column)
        return rows
    for name, column in added.items():
        data = data.add_column(name, column)
    return data


def _is(data: Any, library: str, name: str) -> bool:
    return any(c.__name__ == name and c.__module__.split(".")[0] == library for c in type(data).__mro__)


def _of_ray(data: Any) -> pa.Table:
    parts = [part for part in data.iter_batches(batch_size=None, batch_format="pyarrow") if part.num_rows]
    if not parts:
        raise ConfigError("the ray dataset has no rows.")
    whole = pa.concat_tables(parts, promote_options="default")
    return pa.table(
        {name: _tensors(column) for name, column in zip(whole.schema.names, whole.columns, strict=True)}
    )


def _tensors(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    shape = getattr(kind, "shape", None)
    if not isinstance(kind, pa.BaseExtensionType) or isinstance(kind, pa.FixedShapeTensorType) or not shape:
        return column
    size = math.prod(shape)
    tensor = pa.fixed_shape_tensor(kind.storage_type.value_type, shape)
    chunks = [
        pa.ExtensionArray.from_storage(
            tensor, pa.FixedSizeListArray.from_arrays(chunk.storage.flatten(), size)
        )
        for chunk in column.chunks
    ]
    return pa.chunked_array(chunks, tensor)
