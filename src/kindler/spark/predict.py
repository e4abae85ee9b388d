"""Scoring a Spark DataFrame: a lazy column, computed where the rows are.

Only the model's columns cross to Python, as Arrow. Where the frame is nothing but a Parquet scan, not
even those: Spark sends each row's file and number, and Python reads the columns itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import add
from typing import Any, Protocol
from urllib.parse import unquote, urlparse

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField, StructType

from kindler.data.columns import Columns, unused_name
from kindler.data.parquet import RowReader
from kindler.data.rejoin import OutputJoiner, features_of
from kindler.engine.placement import TaskPlace
from kindler.spark.direct_files import StoredColumns
from kindler.spark.frames import ROW, UNNUMBERED, Where, collected, column
from kindler.spark.sent_tasks import Task, sent_task
from kindler.spark.task_resources import task_gpus
from kindler.spark.versions import takes_columns
from kindler.spark.zip_folders import forget_zip_folders

Arrays = tuple[np.ndarray[Any, Any], ...]
Convert = Callable[[np.ndarray[Any, Any]], pa.Array]


class Scorer(Protocol):
    """What scores: a value that travels to the executors."""

    @property
    def columns(self) -> Columns: ...
    def score(
        self, chunks: Iterable[Arrays], place: TaskPlace | None = None
    ) -> Iterator[list[np.ndarray[Any, Any]]]: ...


def predict_frame(
    frame: DataFrame,
    scorer: Scorer,
    *,
    names: Sequence[str],
    types: Sequence[pa.DataType],
    convert: Convert,
    stored: StoredColumns | None,
) -> DataFrame:
    """`frame` with the model's outputs appended, in the frame's own order.

    Args:
        frame: Any frame, batch or streaming.
        scorer: The model.
        names: The columns to append.
        types: Their Arrow types.
        convert: Makes an Arrow column of an output.
        stored: What the files hold, where the frame is a plain scan of them and Python may read them itself.
    """
    fields = [StructField(name, from_arrow_type(kind)) for name, kind in zip(names, types, strict=True)]
    if not takes_columns(frame.sparkSession):
        return _through_rows(frame, scorer, fields, convert)
    row, struct = (unused_name(name, [*frame.columns, *names]) for name in (ROW, "_kindler_outputs"))
    single = len(names) == 1
    result = fields[0].dataType if single else StructType(fields)
    work = sent_task(_Score(scorer=scorer, names=tuple(names), convert=convert, stored=stored))
    if stored is not None:
        whole, sent = frame, [F.col("_metadata.file_path"), F.col("_metadata.row_index")]
    else:
        # A number that Spark computes makes it hand over rows, which it turns into Arrow a third faster than
        # the vectors of a Parquet scan; and errors can say where a row is.
        number = F.lit(UNNUMBERED) if frame.isStreaming else F.monotonically_increasing_id()
        whole = frame.withColumn(row, number)
        sent = [*map(column, scorer.columns.names), F.col(row)]
    scored = _arrow_udf(work, result)(*sent)
    if single:
        return whole.withColumn(names[0], scored).drop(row)
    whole = whole.withColumn(struct, scored)
    return whole.withColumns({name: F.col(struct).getField(name) for name in names}).drop(row, struct)


def _through_rows(
    frame: DataFrame, scorer: Scorer, fields: Sequence[StructField], convert: Convert
) -> DataFrame:
    """Before Spark 4.1 a function of Arrow columns must take the whole row along."""
    names = [field.name for field in fields]

    def score(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = OutputJoiner(scorer.columns)
        scored = scorer.score(rows.features(batches), _place())
        for table in rows.joined(scored, names=lambda outputs: names, convert=convert):
            yield from table.to_batches()

    return frame.mapInArrow(sent_task(score), StructType([*frame.schema.fields, *fields]))


def first_row(frame: DataFrame, columns: Columns) -> pa.Table:
    """One row of the model's columns: how wide they are is not in the schema."""
    return collected(frame, columns.names, rows=1)


def _arrow_udf(work: Task[tuple[pa.Array, ...], pa.Array], result: Any) -> Callable[..., SparkColumn]:
    from pyspark.sql.pandas.functions import arrow_udf

    # Spark reads from the annotations how rows come in: batches, each a tuple of arrays.
    def score(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        return work(batches)

    function: Any = score
    udf: Callable[..., SparkColumn] = arrow_udf(function, result)
    return udf


@dataclass(frozen=True, kw_only=True)
class _Score:
    """What runs in Spark's Python workers, once per partition."""

    scorer: Scorer
    names: tuple[str, ...]
    convert: Convert
    stored: StoredColumns | None

    def __call__(self, batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        forget_zip_folders()
        chunks = self._received(batches) if self.stored is None else self._read(batches, self.stored)
        for outputs in self.scorer.score(chunks, _place()):
            arrays = [self.convert(output) for output in outputs]
            yield arrays[0] if len(arrays) == 1 else pa.StructArray.from_arrays(arrays, list(self.names))

    def _received(self, batches: Iterable[tuple[pa.Array, ...]]) -> Iterator[Arrays]:
        columns = self.scorer.columns
        for *arrays, ids in batches:
            rows = pa.RecordBatch.from_arrays(arrays, names=list(columns.names))
            yield features_of(columns, rows, Where(ids.to_numpy()))

    def _read(self, batches: Iterable[tuple[pa.Array, ...]], stored: StoredColumns) -> Iterator[Arrays]:
        """The model's columns of the rows that Spark names, read from the file they are in."""
        with ExitStack() as opened:
            reader, path = None, None
            for files, numbers in batches:
                for file, start, stop in _runs(files, numbers.to_numpy()):
                    if reader is None or file != path:
                        opened.close()
                        reader = RowReader(_local(file), self.scorer.columns.names, stored.problem)
                        path = file
                        opened.enter_context(reader)
                    rows = reader.read(start, stop)
                    yield features_of(self.scorer.columns, rows, partial(add, start))


def _place() -> TaskPlace:
    """This task, and the GPUs that Spark gave to it."""
    context = TaskContext.get()
    return TaskPlace(0) if context is None else TaskPlace(context.partitionId(), tuple(task_gpus(context)))


def _runs(files: pa.Array, numbers: np.ndarray[Any, Any]) -> Iterator[tuple[str, int, int]]:
    """Rows of one file whose numbers follow one another, as (file, first, last + 1)."""
    codes = files.dictionary_encode()
    index = codes.indices.to_numpy()
    breaks = np.flatnonzero((np.diff(numbers) != 1) | (np.diff(index) != 0)) + 1
    edges = [0, *breaks.tolist(), len(numbers)]
    for begin, end in pairwise(edges):
        if end > begin:
            yield str(codes.dictionary[int(index[begin])]), int(numbers[begin]), int(numbers[end - 1]) + 1


def _local(uri: str) -> str:
    """Spark names files by percent-encoded URI."""
    parsed = urlparse(uri)
    return unquote(parsed.path) if parsed.scheme == "file" else uri
