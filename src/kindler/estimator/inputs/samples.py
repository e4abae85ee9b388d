"""What scoring needs of any data: rows of the right shape, and a listener that counts scored rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from kindler.data.arrays import values
from kindler.data.columns import Array, Columns, conform, to_numpy
from kindler.data.ragged import read_column
from kindler.engine.hub import Event
from kindler.errors import DataError
from kindler.train.progress import ProgressBar

PROBE_ROWS = 2  # a model that squeezes its output would lose the rows of a single one


def zeros(columns: Columns, layout: Mapping[str, Any], types: Mapping[str, Any]) -> list[Array] | None:
    """A few rows of zeros; None if the width of a column shows only in a row."""
    arrays = []
    for column in columns.features:
        if column.ragged:
            return None
        known, kind = layout.get(column.name), types[column.name]
        scalar = kind is not None and not pa.types.is_nested(kind)
        if known is not None and column.shape is None and column.dtype is None:
            dtype, shape = known
        elif scalar and not pa.types.is_binary(kind):
            empty = to_numpy(pa.array([], kind), column, where=str)
            dtype, shape = empty.dtype, empty.shape[1:]
        elif column.shape is not None:
            dtype, shape = column.dtype or "float32", column.shape
        else:
            return None
        arrays.append(np.zeros((PROBE_ROWS, *shape), dtype))
    return arrays


def repeated_row(row: pa.Table, columns: Columns) -> list[Array]:
    if not row.num_rows:
        raise DataError("the data has no rows, so the width of its columns is unknown.")
    arrays = [read_column(row.column(c.name), c, where=lambda i: i) for c in columns.features]
    return [array[np.zeros(PROBE_ROWS, np.int64)] for array in arrays]


def few_rows(given: Mapping[str, Any], columns: Columns) -> list[Array]:
    arrays = []
    for column in columns.features:
        first = values(given[column.name][:PROBE_ROWS], column.name)
        read = conform if isinstance(first, np.ndarray) else to_numpy
        array = np.array(read(first, column, where=lambda i: i))
        if not len(array):
            raise DataError("the data has no rows, so the width of its columns is unknown.")
        arrays.append(np.repeat(array[:1], PROBE_ROWS, axis=0) if len(array) < PROBE_ROWS else array)
    return arrays


class RowCounter:
    def __init__(self, progress: ProgressBar, rows: int) -> None:
        self._progress, self._rows = progress, rows
        self._done: dict[int, int] = {}

    def __call__(self, event: Event) -> None:
        if event.kind == "log":
            self._progress.log(event.rank, event.fields["line"])
        elif event.fields["name"] == "progress":
            self._done[event.rank] = event.fields["step"]
            done = sum(self._done.values())
            self._progress.report({"name": "progress", "epoch": 1, "step": done, "steps": self._rows})
