"""Resolves a data argument on the worker: data that was sent, or the name of a dataset.

`name[a,b]` selects columns of a table, `name[^a]` all others. The result of a stored function, such as a
`tf.data.Dataset`, is used as it is.
"""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np

from kindler.errors import ConfigError
from kindler.shelves.datasets.shelf import Datasets

__all__ = ["read"]

_COLUMNS = re.compile(r"(?P<name>[^\[\]]+)\[(?P<others>\^?)(?P<columns>[^\[\]]*)\](?P<version>[@^].*)?")


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
    match = _COLUMNS.fullmatch(data)
    if match is None:
        return _stored(data, datasets, trusted=trusted, spark=spark)
    table = _stored(
        match["name"] + (match["version"] or ""), datasets, trusted=trusted, spark=spark, form="pandas"
    )
    named = [name.strip() for name in match["columns"].split(",") if name.strip()]
    columns = [str(name) for name in getattr(table, "columns", ())]
    missing = [name for name in named if name not in columns]
    if missing or not named:
        raise ConfigError(f"{data!r} selects the columns {named}; available: {', '.join(columns) or 'none'}.")
    chosen = [name for name in columns if name not in named] if match["others"] else named
    if spark is not None:
        return table.select(*chosen)
    return table[chosen[0]] if len(chosen) == 1 and not match["others"] else table[chosen]


def _stored(name: str, datasets: Datasets, *, trusted: bool, spark: Any, form: str | None = None) -> Any:
    version = datasets.metadata(name)
    options: dict[str, Any] = {}
    if version.kind == "parquet":
        if spark is not None:
            options = {"as_": "spark", "spark": spark}
        elif form is not None or version.meta.get("made_from") == "spark":
            options = {"as_": "pandas"}
    return _not_paths(datasets.get(str(version), trusted=trusted, **options))


def _not_paths(value: Any) -> Any:
    """Lists as arrays. Text is an error: an estimator would take it for the path of a local file."""
    if isinstance(value, str | bytes | os.PathLike):
        raise ConfigError(
            "expected arrays or tables, received text.\nHint: pass the name of a dataset that holds some."
        )
    return np.asarray(value) if isinstance(value, list) else value
