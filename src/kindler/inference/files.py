"""Scoring Parquet files into Parquet files: each worker its range of rows, order kept. No Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq

from kindler.data import parquet
from kindler.data.rejoin import Alongside
from kindler.inference.outputs import refuse_taken, to_arrow
from kindler.inference.predictor import Predictor

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
    # Left as it is, every process would compute on all cores at once.
    predictor = task.predictor.with_threads(worker.threads)
    rows = Alongside(predictor.columns, first_row=start)
    scored = predictor.score(rows.features(parquet.scan(task.files, names, start, stop)))
    writer: pq.ParquetWriter | None = None
    done = 0
    try:
        for table in _gathered(rows.joined(scored, names=_named(predictor, names), convert=to_arrow)):
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
            done += table.num_rows
            worker.report("progress", step=done)
    finally:
        if writer is not None:
            writer.close()
    return [str(done).encode()]


def _named(predictor: Predictor, taken: Sequence[str]) -> Callable[[int], Sequence[str]]:
    """Names for outputs; a model's own are known, and found to be taken, only once it has returned some."""

    def names(outputs: int) -> Sequence[str]:
        found = predictor.names(outputs)
        refuse_taken(found, taken)
        return found

    return names


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
