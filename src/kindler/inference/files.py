"""Scores Parquet files into Parquet files without Spark; each worker takes a range of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq

from kindler.data import parquet
from kindler.data.rejoin import OutputJoiner
from kindler.engine.placement import TaskPlace, gpus_of_task
from kindler.group import Group
from kindler.inference.outputs import refuse_taken, to_arrow
from kindler.inference.predictor import Predictor

_WRITE_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class FileTask:
    predictor: Predictor
    files: parquet.ParquetFiles
    folder: str


def run(worker: Group, task_bytes: bytes) -> Sequence[bytes]:
    task: FileTask = cloudpickle.loads(task_bytes)
    start, stop = parquet.share(task.files.rows, worker.size, worker.rank)
    names = parquet.schema(task.files).names
    path = Path(task.folder) / f"part-{worker.rank:05d}.parquet"
    # By default every process would compute on all cores at once.
    predictor = task.predictor.with_threads(worker.threads)
    rows = OutputJoiner(predictor.columns, first_row=start)
    place = TaskPlace(worker.rank, tuple(gpus_of_task()))
    scored = predictor.score(rows.features(parquet.scan(task.files, names, start, stop)), place)
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
    """Checked late: a model's own output names are known only once it has returned some."""

    def names(outputs: int) -> Sequence[str]:
        own = predictor.names(outputs)
        refuse_taken(own, taken)
        return own

    return names


def _gathered(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    pending: list[pa.Table] = []
    for table in tables:
        pending.append(table)
        if sum(t.num_rows for t in pending) >= _WRITE_ROWS:
            yield pa.concat_tables(pending)
            pending = []
    if pending:
        yield pa.concat_tables(pending)
