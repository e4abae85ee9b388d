"""Stored datasets over HTTP: as a model's inputs, and as JSON or Arrow for people and programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from kindler.serve.problems import Problem
from kindler.serve.protocols.tables import columns_of, from_records, table_columns
from kindler.serve.protocols.values import plain
from kindler.serve.signature import Array
from kindler.shelves.datasets import Datasets
from kindler.shelves.kinds.parquet import schema_of
from kindler.store import Version

__all__ = ["as_table", "conditions", "read_inputs", "read_value", "to_table"]

_TABLES = ("parquet", "tfrecord")
_LISTS = ("in", "between")


def read_inputs(datasets: Datasets, name: str, most_rows: int) -> tuple[dict[str, Array], bool]:
    """A dataset as arrays for a model, and whether they are columns of a table.

    Raises:
        Problem: 400 or 413: it is of a kind that no model takes, or too large.
    """
    version = datasets.metadata(name)
    rows = version.meta.get("rows")
    if isinstance(rows, list) and None not in rows and sum(rows) > most_rows:
        raise Problem(413, f"the dataset {name!r} has {sum(rows)} rows; {most_rows} are allowed.")
    if version.kind in _TABLES:
        return table_columns(datasets.get(str(version), as_="arrow")), True
    value = datasets.get(str(version))
    if isinstance(value, np.ndarray):
        return {"": value}, False
    raise Problem(400, f"the dataset {name!r} is of kind {version.kind!r}, which no model takes.")


def as_table(datasets: Datasets, version: Version, limit: int, query: Mapping[str, str]) -> pa.Table | None:
    """The first rows of a table that fit the conditions of a query; None for what is no table."""
    if version.kind == "parquet":
        schema = schema_of(version.meta)
        with datasets.get(str(version), lazy=True, as_="arrow", **conditions(schema, query)) as handle:
            return next(iter(handle.iterate(limit)), schema.empty_table())
    if query:
        raise Problem(400, f"conditions such as {next(iter(query))!r} are for tables.")
    if version.kind == "tfrecord":
        table: pa.Table = datasets.get(str(version), as_="arrow")
        return table.slice(0, limit)
    return None


def read_value(datasets: Datasets, version: Version, *, trusted: bool, limit: int) -> Any:
    """What is no table: an array, or a value that JSON has."""
    value = datasets.get(str(version), trusted=trusted)
    if isinstance(value, np.ndarray):
        return _first(value, limit)
    if version.kind == "arrays":
        named = value.items() if isinstance(value, dict) else enumerate(value)
        return {str(name): plain(_first(array, limit)) for name, array in named}
    if isinstance(value, dict | list | str | int | float | None):
        return value
    raise Problem(
        400, f"the dataset {str(version)!r} is a {type(value).__qualname__}, which JSON does not have."
    )


def conditions(schema: pa.Schema, query: Mapping[str, str]) -> dict[str, Any]:
    """`x__gte=90` and the like, with values of the columns' types.

    Raises:
        Problem: 400: a value is none of its column's type.
    """
    found: dict[str, Any] = {}
    for key, text in query.items():
        column, _, operator = key.rpartition("__")
        if key in schema.names or column not in schema.names:
            column, operator = key, "eq"
        if column not in schema.names:
            raise Problem(400, f"there is no column {column!r}; there are {', '.join(schema.names)}.")
        if operator == "isnull":
            found[key] = text.lower() not in ("", "0", "false")
        elif operator in _LISTS:
            found[key] = [_typed(schema, column, part) for part in text.split(",")]
        else:
            found[key] = _typed(schema, column, text)
    return found


def to_table(data: Any, dtypes: Any) -> pa.Table:
    """Columns or rows of JSON as a table.

    Raises:
        Problem: 400: they are no table, or a dtype does not hold them.
    """
    if isinstance(data, dict):
        arrays = columns_of(data)
    elif isinstance(data, list):
        arrays = from_records(data)
    else:
        raise Problem(400, "'data' must be an object of columns, or a list of rows.")
    if dtypes is not None and not isinstance(dtypes, dict):
        raise Problem(400, "'dtypes' must be an object of columns.")
    try:
        columns = {name: pa.array(array.tolist()) for name, array in arrays.items()}
        for name, dtype in (dtypes or {}).items():
            if name not in columns:
                raise Problem(400, f"'dtypes' names {name!r}, which is no column.")
            columns[name] = columns[name].cast(pa.from_numpy_dtype(np.dtype(str(dtype))))
        return pa.table(columns)
    except (pa.ArrowException, TypeError, ValueError) as exc:
        raise Problem(400, f"the data is no table: {exc}") from exc


def _first(array: Array, limit: int) -> Array:
    return array[:limit] if array.ndim else array


def _typed(schema: pa.Schema, column: str, text: str) -> Any:
    kind = schema.field(column).type
    if pa.types.is_boolean(kind) and text.lower() not in ("true", "false", "1", "0"):
        raise Problem(400, f"{text[:80]!r} is no value of the column {column!r}, which is {kind}.")
    try:
        return pa.scalar(text).cast(kind)
    except (pa.ArrowException, ValueError) as exc:
        raise Problem(400, f"{text[:80]!r} is no value of the column {column!r}, which is {kind}.") from exc
