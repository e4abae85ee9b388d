"""Resolves a data argument on the worker: data that was sent, or the name of a dataset.

`name[a,b]` selects columns of a table, `name[^a]` all others, `name#rows:start=2,end=4` rows; `name{k=v}`
calls a stored function with arguments. Its result, such as a `tf.data.Dataset`, is used as it is.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from kindler.errors import ConfigError
from kindler.shelves.datasets import Datasets
from kindler.shelves.expressions import parse_expression


def read(data: Any, datasets: Datasets, *, trusted: bool, spark: Any = None) -> Any:
    """The data of an argument.

    Args:
        data: A dataset's name, or data.
        datasets: The shelf of datasets.
        trusted: Whether a stored function may be called.
        spark: A session, to read tables as Spark DataFrames.

    Raises:
        NotFoundError: There is no such dataset.
        UntrustedError: The dataset is a function, which may not be called.
        ConfigError: The name is invalid, or the table has no such column.
    """
    if not isinstance(data, str):
        return _not_paths(data)
    asked = parse_expression(data)
    if asked.operation == "iterchunks":
        raise ConfigError(
            f"{data!r}: a task reads a dataset at once.\nHint: datasets.get reads it in pieces."
        )
    version = datasets.metadata(asked.name)
    options: dict[str, Any] = dict(asked.arguments or {})
    if options and version.kind != "function":
        raise ConfigError(
            f"{asked.name!r} is of kind {version.kind!r}; only a stored function takes {{k=v}}."
        )
    if version.kind == "parquet":
        whole = asked.columns is None and asked.operation is None
        if spark is not None:
            options = {"as_": "spark", "spark": spark}
        elif not whole or version.meta.get("made_from") == "spark":
            options = {"as_": "pandas"}
    table = _not_paths(datasets.get(str(version), trusted=trusted, **options))
    chosen = asked.chosen(getattr(table, "columns", ()))
    if spark is not None:
        return table if chosen is None else table.select(*chosen)
    if chosen is not None:
        one = len(chosen) == 1 and asked.columns is not None and asked.columns.strip() == chosen[0]
        table = table[chosen[0]] if one else table[chosen]
    if asked.operation == "rows":
        table = table.iloc[asked.options.get("start") : asked.options.get("end")]
    return table


def _not_paths(value: Any) -> Any:
    """Lists as arrays. Text is an error: an estimator would take it for the path of a local file."""
    if isinstance(value, str | bytes | os.PathLike):
        raise ConfigError(
            "expected arrays or tables, received text.\nHint: pass the name of a dataset that holds some."
        )
    return np.asarray(value) if isinstance(value, list) else value
