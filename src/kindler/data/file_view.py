"""One file of a table: which of its rows the table still has, and how its columns become the table's.

Table formats differ in how they say this, not in what: `delta.py` and `iceberg.py` find out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from kindler.errors import DataError

ReadRows: TypeAlias = Callable[[Sequence[str], int, int], Iterator[pa.RecordBatch]]
"""Columns of the file, and its rows from the first to before the last."""


class Storage(Protocol):
    """Where the files of a table are. Picklable; workers open files with it."""

    def open(self, file: str) -> Any:
        """A file object of Arrow, or one that pyarrow can read."""


@dataclass(frozen=True, slots=True, eq=False)
class FileView:
    """How rows of a file become rows of its table.

    Attributes:
        storage: None for what Arrow and fsspec open without more.
        groups: The rows of each row group, with the deleted ones.
        stored: The columns of the file.
        sources: Of each column of the table its column in the file, or the value that all rows have. Those
            that are missing here cannot be read.
        deleted: Positions of deleted rows in the file, ascending.
    """

    storage: Storage | None
    groups: tuple[int, ...]
    stored: pa.Schema
    sources: Mapping[str, str | pa.Scalar]
    deleted: np.ndarray[Any, np.dtype[np.int64]]

    def live_groups(self) -> tuple[int, ...]:
        """The rows of each row group that are not deleted."""
        ends = np.cumsum([0, *self.groups])
        return tuple((np.diff(ends) - np.diff(np.searchsorted(self.deleted, ends))).tolist())

    def position(self, row: int) -> int:
        """The place in the file of a row of the table."""
        before = self.deleted - np.arange(len(self.deleted))
        return row + int(np.searchsorted(before, row, side="right"))

    def rows(
        self, file: str, schema: pa.Schema, start: int, stop: int, read: ReadRows
    ) -> Iterator[pa.RecordBatch]:
        """The columns of `schema` of the rows [start, stop), not counting deleted ones."""
        sources = [self._source(name, file) for name in schema.names]
        first, last = self.position(start), self.position(stop - 1) + 1
        # Without any column of the file, one is read for its number of rows.
        names = list(dict.fromkeys(s for s in sources if isinstance(s, str))) or self.stored.names[:1]
        for batch in read(names, first, last):
            live = np.ones(len(batch), bool)
            low, high = np.searchsorted(self.deleted, [first, first + len(batch)])
            live[self.deleted[low:high] - first] = False
            first += len(batch)
            kept = batch if live.all() else batch.filter(pa.array(live))
            if len(kept):
                columns = [
                    _column(kept, source, field, file) for source, field in zip(sources, schema, strict=True)
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def _source(self, name: str, file: str) -> str | pa.Scalar:
        if name in self.sources:
            return self.sources[name]
        raise DataError(
            f"its nested fields are not those of {file}: the table has changed since that was written.\n"
            "Hint: read the table with Spark and pass the DataFrame.",
            column=name,
        )


def _column(batch: pa.RecordBatch, source: str | pa.Scalar, field: pa.Field, file: str) -> pa.Array:
    if isinstance(source, pa.Scalar):
        return pa.repeat(source, len(batch)) if source.is_valid else pa.nulls(len(batch), field.type)
    column = batch.column(source)
    try:
        return column if column.type == field.type else column.cast(field.type)
    except pa.ArrowException as exc:
        raise DataError(f"{file}: {column.type} is not {field.type}: {exc}", column=field.name) from exc
