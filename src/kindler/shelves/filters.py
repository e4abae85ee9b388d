"""Which rows of a table: `{"x__gt": 3, "name__in": [...]}` as an expression that reading pushes down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kindler.errors import ConfigError

__all__ = ["expression"]

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda field, value: field == value,
    "ne": lambda field, value: field != value,
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


def expression(schema: pa.Schema, given: Any, named: Mapping[str, Any]) -> pc.Expression | None:
    """One expression out of all that was given; None for all rows.

    Args:
        schema: The table's.
        given: A pyarrow expression, a dict of conditions, or None.
        named: Conditions that were given as keywords.

    Raises:
        ConfigError: A column or an operator that there is not.
    """
    conditions = [_condition(schema, key, value) for key, value in named.items()]
    if isinstance(given, Mapping):
        conditions += [_condition(schema, str(key), value) for key, value in given.items()]
    elif isinstance(given, pc.Expression):
        conditions.append(given)
    elif given is not None:
        raise ConfigError(
            f"filter={given!r} is a {type(given).__name__}.\nHint: a pyarrow expression, or a dict such as"
            " {'x__gt': 3}."
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
    if operator == "between" and len(value) != 2:
        raise ConfigError(f"{key}={value!r}: between needs two values, the least and the greatest.")
    return _OPERATORS[operator](pc.field(column), value)
