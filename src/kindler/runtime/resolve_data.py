"""The data of a verb, in the worker: what was sent, or the dataset of that name.

`name[a,b]` are some columns of a table and `name[^a]` all others. A function's result, such as a
`tf.data.Dataset`, is taken as it is.
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


def read(given: Any, datasets: Datasets, *, trusted: bool, spark: Any = None) -> Any:
    """The data that an argument means.

    Args:
        given: A dataset's name, or data.
        datasets: The shelf.
        trusted: Whether a function may be called.
        spark: A session, if a table is to be a Spark DataFrame.

    Raises:
        NotFoundError: There is no such dataset.
        UntrustedError: It is a function, and may not be called.
        ConfigError: Its name cannot be one, or the table has no such column.
    """
    if not isinstance(given, str):
        return _not_paths(given)
    found = _COLUMNS.fullmatch(given)
    if found is None:
        return _stored(given, datasets, trusted=trusted, spark=spark)
    table = _stored(
        found["name"] + (found["version"] or ""), datasets, trusted=trusted, spark=spark, form="pandas"
    )
    named = [name.strip() for name in found["columns"].split(",") if name.strip()]
    there = [str(name) for name in getattr(table, "columns", ())]
    missing = [name for name in named if name not in there]
    if missing or not named:
        raise ConfigError(f"{given!r} selects the columns {named}; available: {', '.join(there) or 'none'}.")
    chosen = [name for name in there if name not in named] if found["others"] else named
    if spark is not None:
        return table.select(*chosen)
    return table[chosen[0]] if len(chosen) == 1 and not found["others"] else table[chosen]


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
    """Lists as arrays. Text is refused: an estimator would take it for the path of a file on this machine.

    Raises:
        ConfigError: It is text.
    """
    if isinstance(value, str | bytes | os.PathLike):
        raise ConfigError(
            "expected arrays or tables, received text.\nHint: pass the name of a dataset that holds some."
        )
    return np.asarray(value) if isinstance(value, list) else value
