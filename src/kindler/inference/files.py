"""Scoring Parquet files into Parquet files: each worker its range of rows, order kept. No Spark."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq

from kindler.data import parquet
from kindler.data.batches import inputs
from kindler.data.columns import to_numpy
from kindler.inference.outputs import to_arrow
from kindler.inference.predictor import Arrays, Predictor

__all__ = ["FileTask", "run"]

_WRITE_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class FileTask:
    """What to score and where to put it."""

    predictor: Predictor
    files: parquet.ParquetFiles
    folder: str


class Worker(Protocol):
    """What this needs of the engine's worker."""

    rank: int
    size: int
    threads: int

    def report(self, kind: str, **fields: Any) -> None: ...


def run(worker: Worker, task_bytes: bytes) -> Sequence[bytes]:
    """Score this worker's rows into one file of the output folder."""
    task: FileTask = cloudpickle.loads(task_bytes)
    start, stop = parquet.share(task.files.rows, worker.size, worker.rank)
    names = parquet.schema(task.files).names
    path = Path(task.folder) / f"part-{worker.rank:05d}.parquet"
    rows = _Rows(task.predictor, start)
    writer: pq.ParquetWriter | None = None
    done = 0
    try:
        for table in _gathered(rows.scored(parquet.scan(task.files, names, start, stop))):
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
            done += table.num_rows
            worker.report("progress", epoch=1, step=done, steps=stop - start)
    finally:
        if writer is not None:
            writer.close()
    return [str(done).encode()]


@dataclass
class _Rows:
    """Keeps the rows that are on their way through the model until their outputs come out."""

    predictor: Predictor
    row: int
    waiting: deque[pa.Table] = field(default_factory=deque)

    def scored(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        for outputs in self.predictor.score(self._features(batches)):
            table = self._next(len(outputs[0]))
            for name, output in zip(self.predictor.names(len(outputs)), outputs, strict=True):
                table = table.append_column(name, to_arrow(output))
            yield table

    def _features(self, batches: Iterator[pa.RecordBatch]) -> Iterator[Arrays]:
        columns = self.predictor.columns
        for batch in batches:
            first = self.row
            self.waiting.append(pa.Table.from_batches([batch]))
            self.row += batch.num_rows
            arrays = [to_numpy(batch.column(c.name), c, where=lambda i, f=first: f + i) for c in columns.features]
            yield inputs(columns, arrays)

    def _next(self, count: int) -> pa.Table:
        parts: list[pa.Table] = []
        while count:
            table = self.waiting.popleft()
            parts.append(table.slice(0, count))
            if table.num_rows > count:
                self.waiting.appendleft(table.slice(count))
            count -= parts[-1].num_rows
        return pa.concat_tables(parts)


def _gathered(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Small tables joined to row groups of a decent size."""
    held: list[pa.Table] = []
    for table in tables:
        held.append(table)
        if sum(t.num_rows for t in held) >= _WRITE_ROWS:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


