"""Which rows of a table: `{"x__gt": 3, "name__in": [...]}` as an expression that reading pushes down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kindler.errors import ConfigError, first_line

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda field, value: field == value if value is not None else field.is_null(nan_is_null=True),
    "ne": lambda field, value: field != value if value is not None else ~field.is_null(nan_is_null=True),
    "lt": lambda field, value: field < value,
    "lte": lambda field, value: field <= value,
    "gt": lambda field, value: field > value,
    "gte": lambda field, value: field >= value,
    "in": lambda field, value: field.isin(list(value)),
    "between": lambda field, value: (field >= value[0]) & (field <= value[1]),
    "isnull": lambda field, value: field.is_null(nan_is_null=True) == bool(value),
    "startswith": pc.starts_with,
    "endswith": pc.ends_with,
    "contains": pc.match_substring,
}


def expression(schema: pa.Schema, filter_: Any, named: Mapping[str, Any]) -> pc.Expression | None:
    """One expression of all conditions; None for all rows.

    Args:
        schema: The table's.
        filter_: A pyarrow expression, a dict of conditions, or None.
        named: More conditions.

    Raises:
        ConfigError: An unknown column or operator, or a value that the column cannot have.
    """
    conditions = [_condition(schema, key, value) for key, value in named.items()]
    if isinstance(filter_, Mapping):
        conditions += [_condition(schema, str(key), value) for key, value in filter_.items()]
    elif isinstance(filter_, pc.Expression):
        conditions.append(_tried(schema, lambda: filter_, f"filter={filter_}"))
    elif filter_ is not None:
        raise ConfigError(
            f"filter={filter_!r} is a {type(filter_).__name__}.\n"
            "Hint: a pyarrow expression, or a dict such as {'x__gt': 3}."
        )
    combined = None
    for condition in conditions:
        combined = condition if combined is None else combined & condition
    return combined


def _condition(schema: pa.Schema, key: str, value: Any) -> pc.Expression:
    column, _, operator = key.rpartition("__")
    if key in schema.names:
        column, operator = key, "eq"
    if column not in schema.names:
        raise ConfigError(
            f"{key!r}: there is no column {column or key!r}; there are {', '.join(schema.names)}."
        )
    if operator not in _OPERATORS:
        raise ConfigError(f"{key!r}: there is no operator {operator!r}; there are {', '.join(_OPERATORS)}.")
    shown = f"{key}={value!r}: the column {column!r} is {schema.field(column).type}"
    if operator == "between" and not (isinstance(value, Sequence) and len(value) == 2):
        raise ConfigError(f"{shown}; between needs two values, the least and the greatest.")
    if operator == "in" and isinstance(value, str | bytes):
        raise ConfigError(f"{shown}; in needs a list of values.")
    return _tried(schema, lambda: _OPERATORS[operator](pc.field(column), value), shown)


def _tried(schema: pa.Schema, make: Callable[[], pc.Expression], shown: str) -> pc.Expression:
    """A condition that such a table can be asked for: tried on none of its rows."""
    try:
        condition = make()
        schema.empty_table().filter(condition)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
        raise ConfigError(
            f"{shown}, and cannot be compared so: {first_line(exc)}.\nHint: a condition is a column, an"
            " operator and a value of the column's type, such as {'x__gt': 3} or {'name__in': ['a', 'b']}."
        ) from exc
    return condition
