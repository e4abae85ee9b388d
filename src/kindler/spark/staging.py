"""Rows on their way to workers of the same machine: files for each worker, instead of a shuffle.

Spark keeps a shuffle until nobody can read it any more, so its files and the workers' own would be two copies
of all rows. On "local[n]" every task sees the same disk and no task runs twice: there, the tasks that compute
the rows write them into files of some megabytes for each worker, and a worker removes each as soon as it has
read it.

    PARTITION-ATTEMPT/RANK-NUMBER-ROWS.arrow    an Arrow stream; its number says where it stands among those
                                                of the same partition and rank
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from kindler.errors import DiskFullError, naming_full_disk
from kindler.spark.frames import LANE
from kindler.spark.session import is_connect
from kindler.spark.slots import never_retries
from kindler.spark.versions import to_arrow
from kindler.temporary import Folder

_RESULT = "partition int, place string, problem binary"
_FILE_BYTES = 8 << 20  # so much of a worker's rows is on the disk twice at a time
_ENDING = ".arrow"


def can_stage(spark: SparkSession) -> bool:
    """Whether all tasks see one disk, and none is run again after it has read its rows."""
    return not is_connect(spark) and never_retries(spark)


class Staging:
    """The files between the tasks that compute rows and the workers; a context manager that removes them.

    Args:
        spark: A session that `can_stage`.
        run_id: The run they are for.
        workers: How many workers the rows were dealt to.
    """

    def __init__(self, spark: SparkSession, run_id: str, workers: int) -> None:
        self._workers = workers
        context: Any = spark.sparkContext
        # pyspark's own folder below spark.local.dir, which Spark removes if nobody else can.
        self._folder = Folder(f"kindler-{run_id}-rows-", Path(context._temp_dir))
        self._place = self._folder.path / "rows"
        self._place.mkdir()

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # a task that was cancelled may still be writing: it finds no folder then
            self._place.rename(self._folder.path / "gone")
        self._folder.remove()

    def write(self, frame: DataFrame) -> tuple[str, ...]:
        """Have Spark compute dealt rows and write them; the folders that have them, in the order of the rows.

        There is none if Spark knows that the frame is empty.

        Raises:
            DiskFullError: They do not fit.
        """
        task = _WriteTask(str(self._place), self._workers, _FILE_BYTES)
        table = to_arrow(frame.mapInArrow(task, _RESULT))
        for problem in table.column("problem").to_pylist():
            if problem is not None:
                raise pickle.loads(problem)
        ordered = table.sort_by("partition")
        return tuple(ordered.column("place").to_pylist())

    def written(self) -> tuple[int, int]:
        """The rows in files that are complete, and the bytes in all files."""
        rows = size = 0
        for file in self._place.glob(f"*/*{_ENDING}*"):
            with suppress(FileNotFoundError):  # it was completed, or read, meanwhile
                size += file.stat().st_size
                rows += int(file.stem.rpartition("-")[2]) if file.suffix == _ENDING else 0
        return rows, size


def staged_batches(places: Sequence[str], rank: int) -> Iterator[pa.RecordBatch]:
    """The rows of one worker, in their order; each file is removed before its rows are given."""
    for place in places:
        for path in sorted(Path(place).glob(f"{rank}-*{_ENDING}")):
            with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
                table = reader.read_all()
            path.unlink()
            yield from table.combine_chunks().to_batches()


@dataclass(frozen=True)
class _WriteTask:
    """What a task does with the rows of its partition: it writes those of each worker into files."""

    folder: str
    workers: int
    file_bytes: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        partition = context.partitionId()
        place = Path(self.folder, f"{partition}-{context.taskAttemptId()}")
        problem: bytes | None = None
        try:
            place.mkdir()
            self._write(place, batches)
        except DiskFullError as exc:  # as a result: raised, it would look like a fault of the frame
            shutil.rmtree(place, ignore_errors=True)
            problem = pickle.dumps(exc)
            for _ in batches:
                pass
        yield pa.RecordBatch.from_arrays(
            [
                pa.array([partition], pa.int32()),
                pa.array([str(place)], pa.string()),
                pa.array([problem], pa.binary()),
            ],
            ["partition", "place", "problem"],
        )

    def _write(self, place: Path, batches: Iterator[pa.RecordBatch]) -> None:
        with ExitStack() as stack:
            lots = [stack.enter_context(_Lot(place, rank, self.file_bytes)) for rank in range(self.workers)]
            for batch in batches:
                owners = batch.column(LANE).to_numpy() % self.workers
                for rank, lot in enumerate(lots):
                    rows = np.flatnonzero(owners == rank)
                    if len(rows) == batch.num_rows:
                        lot.add(batch)
                    elif len(rows):
                        lot.add(batch.take(pa.array(rows)))


@dataclass
class _Lot:
    """The files of one worker, written one after another."""

    place: Path
    rank: int
    file_bytes: int
    count: int = 0
    rows: int = 0
    _open: ExitStack = field(default_factory=ExitStack)
    _writer: Any = None
    _file: Any = None

    def __enter__(self) -> _Lot:
        return self

    def __exit__(self, kind: Any, exc: Any, trace: Any) -> None:
        if kind is None:
            self._complete()
        else:
            with suppress(OSError):
                self._open.close()

    def add(self, batch: pa.RecordBatch) -> None:
        """Write rows behind the others."""
        with naming_full_disk(self._part, batch.nbytes):
            if self._writer is None:
                self._file = self._open.enter_context(pa.OSFile(str(self._part), "wb"))
                self._writer = self._open.enter_context(pa.ipc.new_stream(self._file, batch.schema))
            self._writer.write_batch(batch)
            self.rows += batch.num_rows
            if self._file.tell() >= self.file_bytes:
                self._complete()

    def _complete(self) -> None:
        if self._writer is None:
            return
        with naming_full_disk(self._part):
            self._open.close()
        os.rename(self._part, self.place / f"{self.rank}-{self.count:06d}-{self.rows}{_ENDING}")
        self._writer = self._file = None
        self.count, self.rows = self.count + 1, 0

    @property
    def _part(self) -> Path:
        return self.place / f"{self.rank}{_ENDING}.part"
