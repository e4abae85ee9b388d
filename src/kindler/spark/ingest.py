"""Rows on their way to the workers: through files on one machine, and counted for the progress line.

Spark keeps a shuffle until nobody can read it any more, so that all rows would be on disk twice. On
"local[n]" all tasks share a disk and none runs twice: there, the tasks that compute rows write them to files
of some megabytes for each worker, which removes each as soon as it has read it:

    PARTITION-ATTEMPT/RANK-NUMBER-ROWS.arrow    an Arrow stream; NUMBER orders those of a partition and rank

Counts go to the run's listener as "ingest" reports. Spark's own come from its status store, which only
classic sessions have; they grow when a task ends, and every ten seconds while it runs.
"""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from kindler.errors import DiskFullError, naming_full_disk
from kindler.spark.executors import Polling, never_retries
from kindler.spark.frames import LANE
from kindler.spark.versions import is_connect, stage_data, temporary_folder, to_arrow
from kindler.temporary import Folder

REPORT = "ingest"
_FILE_BYTES = 8 << 20  # so much of a worker's rows is on the disk twice at a time
_ENDING = ".arrow"
_POLL_S = 1.0
_REPORT_S = 0.5


def can_stage(spark: SparkSession) -> bool:
    """Whether all tasks share one disk, and none is run again after it has read its rows."""
    return not is_connect(spark) and never_retries(spark)


class Staging:
    def __init__(self, spark: SparkSession, run_id: str, workers: int) -> None:
        self._workers = workers
        self._folder = Folder(f"kindler-{run_id}-rows-", temporary_folder(spark.sparkContext))
        self._place = self._folder.path / "rows"
        self._place.mkdir()

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):  # a task that was cancelled may still be writing: it finds no folder then
            self._place.rename(self._folder.path / "gone")
        self._folder.remove()

    def write(self, frame: DataFrame) -> tuple[str, ...]:
        """The folders with the rows, in their order; none if Spark knows that the frame is empty."""
        task = partial(_write_rows, str(self._place), self._workers, _FILE_BYTES)
        table = to_arrow(frame.mapInArrow(task, "partition int, place string, problem binary"))
        for problem in table.column("problem").to_pylist():
            if problem is not None:
                raise pickle.loads(problem)
        return tuple(table.sort_by("partition").column("place").to_pylist())

    def written(self) -> tuple[int, int]:
        rows = size = 0
        for file in self._place.glob(f"*/*{_ENDING}*"):
            with suppress(FileNotFoundError):  # it was completed, or read, meanwhile
                size += file.stat().st_size
                rows += int(file.stem.rpartition("-")[2]) if file.suffix == _ENDING else 0
        return rows, size


def staged_batches(places: Sequence[str], rank: int) -> Iterator[pa.RecordBatch]:
    """One worker's rows, in order; each file is removed before its rows are yielded."""
    for place in places:
        for path in sorted(Path(place).glob(f"{rank}-*{_ENDING}")):
            with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
                table = reader.read_all()
            path.unlink()
            yield from table.combine_chunks().to_batches()


def _write_rows(
    folder: str, workers: int, file_bytes: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    assert context is not None
    place = Path(folder, f"{context.partitionId()}-{context.taskAttemptId()}")
    problem: bytes | None = None
    try:
        place.mkdir()
        writers = [_WorkerFiles(place, rank, file_bytes) for rank in range(workers)]
        for batch in batches:
            owners = batch.column(LANE).to_numpy() % workers
            for rank, writer in enumerate(writers):
                rows = np.flatnonzero(owners == rank)
                if len(rows):
                    writer.add(batch if len(rows) == batch.num_rows else batch.take(pa.array(rows)))
        for writer in writers:
            writer.complete()
    except DiskFullError as exc:  # as a result: raised, it would look like a fault of the frame
        shutil.rmtree(place, ignore_errors=True)
        problem = pickle.dumps(exc)
        for _ in batches:
            pass
    kinds = {"partition": pa.int32(), "place": pa.string(), "problem": pa.binary()}
    row = {"partition": context.partitionId(), "place": str(place), "problem": problem}
    yield pa.RecordBatch.from_pylist([row], pa.schema(kinds))


class _WorkerFiles:
    def __init__(self, place: Path, rank: int, file_bytes: int) -> None:
        self._place, self._rank, self._file_bytes = place, rank, file_bytes
        self._part = place / f"{rank}{_ENDING}.part"
        self._count = self._rows = 0
        self._writer: Any = None
        self._file: Any = None

    def add(self, batch: pa.RecordBatch) -> None:
        with naming_full_disk(self._part, batch.nbytes):
            if self._writer is None:
                self._file = pa.OSFile(str(self._part), "wb")
                self._writer = pa.ipc.new_stream(self._file, batch.schema)
            self._writer.write_batch(batch)
            self._rows += batch.num_rows
            if self._file.tell() >= self._file_bytes:
                self.complete()

    def complete(self) -> None:
        if self._writer is None:
            return
        with naming_full_disk(self._part):
            self._writer.close()
            self._file.close()
        os.rename(self._part, self._place / f"{self._rank}-{self._count:06d}-{self._rows}{_ENDING}")
        self._writer = self._file = None
        self._count, self._rows = self._count + 1, 0


class ReceivedRows:
    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report
        self._rows = self._bytes = 0
        self._reported = time.monotonic()

    def add(self, rows: int, size: int) -> None:
        self._rows += rows
        self._bytes += size
        if time.monotonic() - self._reported >= _REPORT_S:
            self._send(done=False)

    def end(self) -> None:
        if self._rows:
            self._send(done=True)

    def _send(self, *, done: bool) -> None:
        self._reported = time.monotonic()
        self._report(REPORT, stage="received", rows=self._rows, bytes=self._bytes, done=done)


class ComputedRows(Polling):
    """`written` counts where tasks write files; otherwise Spark's shuffle counts are used."""

    def __init__(
        self,
        context: Any,
        group: str,
        *,
        over: Callable[[], bool],
        report: Callable[..., None],
        written: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        super().__init__("kindler-computed-rows", _POLL_S)
        self._context, self._group, self._over, self._report = context, group, over, report
        self._written = written
        self._reported: dict[str, int] = {}

    def look(self) -> bool:
        if self._over():
            return False
        counts = self._counts()
        if counts["tasks"] and counts != self._reported:
            self._reported = counts
            self._report(REPORT, stage="computed", **counts)
        return True

    def _counts(self) -> dict[str, int]:
        tracker = self._context.statusTracker()
        counts = dict.fromkeys(("rows", "bytes", "done_tasks", "tasks"), 0)
        for job in tracker.getJobIdsForGroup(self._group):
            info = tracker.getJobInfo(job)
            for stage in info.stageIds if info is not None else ():
                with suppress(Py4JError):  # one that Spark has not planned yet, or has forgotten
                    data = stage_data(self._context, stage)
                    if data.shuffleWriteRecords() or data.numActiveTasks() or data.numCompleteTasks():
                        counts["rows"] += int(data.shuffleWriteRecords())
                        counts["bytes"] += int(data.shuffleWriteBytes())
                        counts["done_tasks"] += int(data.numCompleteTasks())
                        counts["tasks"] += int(data.numTasks())
        if self._written is not None:
            counts["rows"], counts["bytes"] = self._written()
        return counts
