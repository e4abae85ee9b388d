"""Rejoins a model's outputs with their rows, although batch sizes differ."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import add

import pyarrow as pa

from kindler.data.batches import inputs
from kindler.data.columns import Array, ColumnPlan, Where
from kindler.data.ragged import read_column


class Chunk(tuple[Array, ...]):
    """Model inputs, with `where` to name a row in later error messages."""

    where: Where


def features_of(columns: ColumnPlan, batch: pa.RecordBatch | pa.Table, where: Where) -> tuple[Array, ...]:
    arrays = [read_column(batch.column(column.name), column, where=where) for column in columns.features]
    chunk = Chunk(inputs(columns, arrays))
    chunk.where = where
    return chunk


class OutputJoiner:
    def __init__(self, columns: ColumnPlan, *, first_row: int = 0) -> None:
        self._columns = columns
        self._row = first_row
        self._waiting: deque[pa.Table] = deque()

    def features(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Array, ...]]:
        for batch in batches:
            self._waiting.append(pa.Table.from_batches([batch]))
            first, self._row = self._row, self._row + batch.num_rows
            yield features_of(self._columns, batch, partial(add, first))

    def joined(
        self,
        scored: Iterable[Sequence[Array]],
        *,
        names: Callable[[int], Sequence[str]],
        convert: Callable[[Array], pa.Array],
    ) -> Iterator[pa.Table]:
        for outputs in scored:
            table = self._next(len(outputs[0]))
            for name, output in zip(names(len(outputs)), outputs, strict=True):
                table = table.append_column(name, convert(output))
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
