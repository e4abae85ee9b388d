"""Stored datasets over HTTP: as a model's inputs, and as JSON or Arrow for people and programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kindler.models.signature import Array
from kindler.serve.http_errors import Problem
from kindler.serve.protocols.tables import table_columns
from kindler.shelves.datasets import Datasets
from kindler.shelves.tables import expression, schema_of
from kindler.store import Version

_ARRAYS = ("numpy", "arrays")
_STEP_ROWS, _STEP_BYTES = 16_384, 16 << 20  # that are read of a table at a time
_LISTS = ("in", "between")


def read_inputs(
    datasets: Datasets, name: str, *, most_rows: int, most_bytes: int
) -> tuple[dict[str, Array], bool]:
    """A dataset as arrays for a model, and whether they are columns of a table."""
    version = datasets.metadata(name)
    rows = version.meta.get("rows")
    if isinstance(rows, list) and None not in rows and sum(rows) > most_rows:
        raise Problem(413, f"the dataset {name!r} has {sum(rows)} rows; at most {most_rows} are allowed.")
    table = as_table(datasets, version, most_rows, {}, most_bytes=most_bytes)
    if table is not None:
        return table_columns(table), True
    if version.kind != "numpy":
        kind = version.kind
        raise Problem(400, f"the dataset {name!r} is of kind {kind!r}, which cannot be used as model input.")
    _check_bytes(version.size, most_bytes)
    return {"": datasets.get(str(version))}, False


def as_table(
    datasets: Datasets, version: Version, limit: int, query: Mapping[str, str], *, most_bytes: int
) -> pa.Table | None:
    """The first rows of a table that fit the conditions of a query; None for what is no table."""
    if version.kind == "parquet":
        schema = schema_of(version.meta)
        wanted = expression(schema, None, conditions(schema, query))
        with datasets.get(str(version), lazy=True, as_="arrow") as handle:
            return _first_rows(handle.files, schema, wanted, limit, most_bytes)
    if query:
        raise Problem(400, f"conditions such as {next(iter(query))!r} work only on tables.")
    if version.kind != "tfrecord":
        return None
    with datasets.get(str(version), lazy=True, as_="arrow") as handle:
        table: pa.Table = next(iter(handle.iterate(limit)), None)
    if table is None:
        table = datasets.get(str(version), as_="arrow")  # no rows, but columns
    _check_bytes(table.nbytes, most_bytes)
    return table


def read_value(datasets: Datasets, version: Version, *, trusted: bool, limit: int, most_bytes: int) -> Any:
    """What is no table: an array, or a value that JSON has."""
    if version.kind in _ARRAYS and None not in version.meta.get("rows", [None]):
        with datasets.get(str(version), lazy=True) as handle:
            value = next(iter(handle.iterate(limit)), None)
        value = datasets.get(str(version)) if value is None else value  # no rows, but a shape
    else:
        _check_bytes(version.size, most_bytes)
        value = datasets.get(str(version), trusted=trusted)
    if isinstance(value, np.ndarray):
        _check_bytes(value.nbytes, most_bytes)
        return _first(value, limit)
    if version.kind == "arrays":
        named = dict(value.items() if isinstance(value, dict) else enumerate(value))
        _check_bytes(sum(array.nbytes for array in named.values()), most_bytes)
        return {str(name): _first(array, limit) for name, array in named.items()}
    if isinstance(value, dict | list | str | int | float | None):
        return value
    kind = type(value).__qualname__
    raise Problem(400, f"the dataset {str(version)!r} is a {kind}, which cannot be written as JSON.")


def _first_rows(
    files: Sequence[Path], schema: pa.Schema, wanted: pc.Expression | None, limit: int, most_bytes: int
) -> pa.Table:
    """Read no more of the files than the first rows need, a few at a time."""
    tables: list[pa.Table] = []
    rows = size = 0
    for path in files:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            metadata = file.metadata
            total = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
            each = max(1, total // max(1, metadata.num_rows))
            step = max(1, min(limit, _STEP_ROWS, _STEP_BYTES // each))
            for batch in file.iter_batches(step, use_threads=False):
                table = pa.Table.from_batches([batch]).cast(schema)
                table = table if wanted is None else table.filter(wanted)
                table = table.slice(0, limit - rows)
                if not table.num_rows:
                    continue
                rows, size = rows + table.num_rows, size + table.nbytes
                _check_bytes(size, most_bytes)
                tables.append(table)
                if rows == limit:
                    return pa.concat_tables(tables)
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _check_bytes(size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise Problem(
            413,
            f"these rows have {size} bytes or more; at most {most_bytes} are allowed. Hint: use a smaller"
            " ?limit=, or read it with kindler.Store(...).datasets.",
        )


def conditions(schema: pa.Schema, query: Mapping[str, str]) -> dict[str, Any]:
    """`x__gte=90` and the like, with values of the columns' types."""
    filters: dict[str, Any] = {}
    for key, text in query.items():
        column, _, operator = key.rpartition("__")
        if key in schema.names or column not in schema.names:
            column, operator = key, "eq"
        if column not in schema.names:
            raise Problem(400, f"there is no column {column!r}; available: {', '.join(schema.names)}.")
        if operator == "isnull":
            filters[key] = text.lower() not in ("", "0", "false")
        elif operator in _LISTS:
            filters[key] = [_typed(schema, column, part) for part in text.split(",")]
        else:
            filters[key] = _typed(schema, column, text)
    return filters


def _first(array: Array, limit: int) -> Array:
    return array[:limit] if array.ndim else array


def _typed(schema: pa.Schema, column: str, text: str) -> Any:
    kind = schema.field(column).type
    try:
        if pa.types.is_boolean(kind) and text.lower() not in ("true", "false", "1", "0"):
            raise ValueError(text)
        return pa.scalar(text).cast(kind)
    except (pa.ArrowException, ValueError) as exc:
        raise Problem(
            400, f"{text[:80]!r} is not a valid value for the column {column!r} of type {kind}."
        ) from exc
