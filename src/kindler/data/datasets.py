"""Datasets of Hugging Face and of ray as Arrow tables. Neither library is imported to tell what something is.

    Hugging Face `datasets.Dataset`    its own Arrow table, mapped where it is; rows picked by its indices
    `ray.data.Dataset`                 its blocks, brought to this process

Which columns can feed a model is said by `columns`; here they only become Arrow's own types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from kindler.errors import ConfigError


def is_dataset(data: Any) -> bool:
    """Whether this is a dataset with rows that can be numbered."""
    return _is(data, "datasets", "Dataset") or _is(data, "ray", "Dataset")


def refuse_unusable(data: Any) -> None:
    """Complain about what these libraries have besides.

    Raises:
        ConfigError: A dict of splits, a stream, or a dataset whose rows a function makes when they are read.
    """
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
            "data computes its rows when they are read (set_transform), so its table holds different ones.\n"
            "Hint: apply the function with data.map(...)."
        )


def table(data: Any) -> pa.Table:
    """All columns of a dataset, in its order of rows."""
    refuse_unusable(data)
    if _is(data, "ray", "Dataset"):
        return _of_ray(data)
    if data._indices is None:
        mapped: pa.Table = data.data.table
        return mapped
    picked: pa.Table = data.with_format("arrow")[:]
    return picked


def with_columns(data: Any, rows: pa.Table, added: Mapping[str, pa.Array]) -> Any:
    """What was handed in with columns appended: a Hugging Face dataset again, or for ray a table.

    Args:
        data: The dataset.
        rows: What `table` gave for it: ray need not bring its rows in the same order again.
        added: The columns.
    """
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
    """ray's tensors of one shape as Arrow's, which keep the shape; other columns as they are."""
    kind = column.type
    shape = getattr(kind, "shape", None)
    if not isinstance(kind, pa.BaseExtensionType) or isinstance(kind, pa.FixedShapeTensorType) or not shape:
        return column
    size = 1
    for length in shape:
        size *= length
    value = kind.storage_type.value_type
    tensor = pa.fixed_shape_tensor(value, shape)
    chunks = [
        pa.ExtensionArray.from_storage(
            tensor, pa.FixedSizeListArray.from_arrays(chunk.storage.flatten(), size)
        )
        for chunk in column.chunks
    ]
    return pa.chunked_array(chunks, tensor)
