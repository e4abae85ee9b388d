"""Rejoins a model's outputs with their rows, although batch sizes differ."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import add
from typing import Any

import numpy as np
import pyarrow as pa

from kindler.data.batches import inputs
from kindler.data.columns import Array, ColumnPlan, Where
from kindler.data.ragged import Ragged, read_column
from kindler.errors import DataError

_SHORT_STRETCH = 4  # rows


class Chunk(tuple[Array, ...]):
    """Model inputs, with `where` to name a row in later error messages. Of `rows` rows, those in `failed`
    could not be read, and are not among the inputs."""

    where: Where
    rows: int
    failed: Mapping[int, DataError]

    def copied(self) -> Chunk:
        """With arrays that may be written to."""
        chunk = Chunk(array if isinstance(array, Ragged) else np.array(array) for array in self)
        chunk.where, chunk.rows, chunk.failed = self.where, self.rows, self.failed
        return chunk


def features_of(
    columns: ColumnPlan, batch: pa.RecordBatch | pa.Table, where: Where, *, lenient: bool = False
) -> Chunk:
    values = [batch.column(column.name) for column in columns.features]
    return chunk_of(columns, batch.num_rows, values, where, lenient=lenient)


def chunk_of(
    columns: ColumnPlan,
    rows: int,
    values: Sequence[Any],
    where: Where,
    *,
    lenient: bool,
) -> Chunk:
    """`values` are those of each feature. With `lenient`, rows that cannot be read are left out."""
    kept, failed = np.arange(rows), dict[int, DataError]()
    try:
        arrays = _read(columns, values, where)
    except DataError:
        if not lenient:
            raise
        arrays = _read_without(columns, values, where, kept, failed)
        kept = np.delete(kept, sorted(failed))
    chunk = Chunk(inputs(columns, arrays))
    chunk.rows, chunk.failed = rows, failed
    chunk.where = (lambda i: where(int(kept[i]))) if failed else where
    return chunk


def _read(columns: ColumnPlan, values: Sequence[Any], where: Where) -> list[Array]:
    pairs = zip(values, columns.features, strict=True)
    return [read_column(given, column, where=where) for given, column in pairs]


def _read_without(
    columns: ColumnPlan,
    values: Sequence[Any],
    where: Where,
    kept: Array,
    failed: dict[int, DataError],
) -> list[Array]:
    """Each round leaves out all rows with the first problem that is found."""
    whole = [each.combine_chunks() if isinstance(each, pa.ChunkedArray) else each for each in values]
    while True:
        some = [_at(each, kept) for each in whole]
        try:
            return _read(columns, some, where)
        except DataError as exc:
            if exc.positions is None or not len(exc.positions):  # of the whole column
                raise
            failed |= dict.fromkeys(kept[list(exc.positions)].tolist(), exc)
            kept = np.delete(kept, list(exc.positions))


def _at(values: Any, places: Array) -> Any:
    """The values at rising places; a few stretches of Arrow's are much quicker to copy than single rows."""
    if isinstance(values, np.ndarray):
        return values[places]
    stretches = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    if len(stretches) * _SHORT_STRETCH > len(places):
        return values.take(pa.array(places))
    return pa.concat_arrays([values.slice(int(part[0]), len(part)) for part in stretches])


class OutputJoiner:
    def __init__(self, columns: ColumnPlan, *, first_row: int = 0, lenient: bool = False) -> None:
        self._columns, self._lenient = columns, lenient
        self._row = first_row
        self._waiting: deque[pa.Table] = deque()

    def features(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Array, ...]]:
        for batch in batches:
            self._waiting.append(pa.Table.from_batches([batch]))
            first, self._row = self._row, self._row + batch.num_rows
            yield features_of(self._columns, batch, partial(add, first), lenient=self._lenient)

    def joined(
        self,
        scored: Iterable[Sequence[Array]],
        *,
        names: Callable[[int], Sequence[str]],
        convert: Callable[[Sequence[Array]], Sequence[pa.Array]],
    ) -> Iterator[pa.Table]:
        for outputs in scored:
            table = self._next(len(outputs[0]))
            for name, column in zip(names(len(outputs)), convert(outputs), strict=True):
                table = table.append_column(name, column)
            yield table

    def _next(self, count: int) -> pa.Table:
        parts: list[pa.Table] = []
        while count:
            table = self._waiting.popleft()
            parts.append(table.slice(0, count))
            if table.num_rows > count:
                self._waiting.appendleft(table.slice(count))
            count -= parts[-1].num_rows
        return pa.concat_tables(parts)
