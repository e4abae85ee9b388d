"""A model in Spark: a lazy column or an SQL function, computed where the rows are. From Spark 4.1
on, only the model's columns cross to Python, as Arrow; earlier versions send whole rows. For a plain Parquet
scan, Spark 4.1 sends only each row's file and number, and Python reads the columns itself."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from operator import add
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField, StructType

from kindler.data.columns import ColumnPlan, unused_name
from kindler.data.parquet import RowReader
from kindler.data.paths import local_path
from kindler.data.rejoin import OutputJoiner, features_of
from kindler.engine.placement import TaskPlace
from kindler.errors import ConfigError, RowErrorsWarning
from kindler.spark.direct import StoredColumns
from kindler.spark.frames import ROW, UNNUMBERED, Where, column
from kindler.spark.tasks import Task, forget_zip_folders, sent_task, task_gpus
from kindler.spark.versions import takes_columns

Arrays = tuple[np.ndarray[Any, Any], ...]
Convert = Callable[[Sequence[np.ndarray[Any, Any]]], Sequence[pa.Array]]
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Scorer(Protocol):
    """A model that travels to the executors."""

    @property
    def columns(self) -> ColumnPlan: ...
    @property
    def lenient(self) -> bool: ...
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
    """In the frame's order; `stored` is set if Python may read the files of a plain scan itself."""
    fields = _fields(names, types)
    if not takes_columns(frame.sparkSession):
        return _through_rows(frame, scorer, fields, convert)
    row, struct = (unused_name(name, [*frame.columns, *names]) for name in (ROW, "_kindler_outputs"))
    if stored is not None:
        read = partial(_read, scorer, stored)
        whole, sent = frame, [F.col("_metadata.file_path"), F.col("_metadata.row_index")]
    else:
        read = partial(_received, scorer, numbered=True)
        # A number that Spark computes makes it hand over rows, which it turns into Arrow a third faster than
        # the vectors of a Parquet scan; and errors can say where a row is.
        number = F.lit(UNNUMBERED) if frame.isStreaming else F.monotonically_increasing_id()
        whole = frame.withColumn(row, number)
        sent = [*map(column, scorer.columns.names), F.col(row)]
    task = sent_task(partial(_score, scorer, tuple(names), convert, read, placed=True))
    scored = _arrow_udf(task, _result_type(fields))(*sent)
    if len(names) == 1:
        return whole.withColumn(names[0], scored).drop(row)
    whole = whole.withColumn(struct, scored)
    return whole.withColumns({name: F.col(struct).getField(name) for name in names}).drop(row, struct)


def _through_rows(
    frame: DataFrame, scorer: Scorer, fields: Sequence[StructField], convert: Convert
) -> DataFrame:
    """Before Spark 4.1, a function of Arrow columns must take the whole row along."""
    names = [field.name for field in fields]

    def score(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = OutputJoiner(scorer.columns, lenient=scorer.lenient)
        scored = scorer.score(rows.features(batches), _place())
        for table in rows.joined(scored, names=lambda outputs: names, convert=convert):
            yield from table.to_batches()
        _warn(scorer)

    return frame.mapInArrow(sent_task(score), StructType([*frame.schema.fields, *fields]))


def check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"register_udf(name={name!r}): not the name of a function: letters, digits and _.")


def register_function(
    spark: SparkSession,
    name: str,
    scorer: Scorer,
    *,
    names: Sequence[str],
    types: Sequence[pa.DataType],
    convert: Convert,
) -> Callable[..., Any]:
    """An SQL function of the model's columns, in order; several outputs become a struct."""
    result = _result_type(_fields(names, types))
    read = partial(_received, scorer, numbered=False)
    task = sent_task(partial(_score, scorer, tuple(names), convert, read))
    make = _arrow_udf if takes_columns(spark) else _pandas_udf
    function: Callable[..., Any] = spark.udf.register(name, make(task, result))
    return function


def _fields(names: Sequence[str], types: Sequence[pa.DataType]) -> list[StructField]:
    return [StructField(name, from_arrow_type(kind)) for name, kind in zip(names, types, strict=True)]


def _result_type(fields: list[StructField]) -> Any:
    return fields[0].dataType if len(fields) == 1 else StructType(fields)


def _arrow_udf(task: Task[tuple[pa.Array, ...], pa.Array], result: Any) -> Any:
    from pyspark.sql.pandas.functions import arrow_udf

    # Spark reads from the annotations how rows come in: batches, each a tuple of arrays.
    def score(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        return task(batches)

    function: Any = score
    return arrow_udf(function, result)


def _pandas_udf(task: Task[Any, pa.Array], result: Any) -> Any:
    """Before Spark 4.1, columns come as pandas series."""
    import pandas as pd
    from pyspark.sql.pandas.functions import pandas_udf

    many = isinstance(result, StructType)

    def score(batches: Any) -> Any:
        for scored in task(
            tuple(map(pa.Array.from_pandas, batch if isinstance(batch, tuple) else (batch,)))
            for batch in batches
        ):
            yield pd.DataFrame(scored.to_pylist()) if many else pd.Series(scored.to_pylist())

    # Spark reads from the annotations how rows come in.
    series: Any = pd.Series
    output: Any = pd.DataFrame if many else pd.Series
    score.__annotations__ = {"batches": Iterator[tuple[series, ...]], "return": Iterator[output]}
    make: Any = pandas_udf
    return make(score, result)


def _score(
    scorer: Scorer,
    names: tuple[str, ...],
    convert: Convert,
    read: Callable[[Iterable[Any]], Iterator[Arrays]],
    batches: Iterator[Any],
    *,
    placed: bool = False,
) -> Iterator[pa.Array]:
    """Runs in Spark's Python workers, once per partition."""
    forget_zip_folders()
    for outputs in scorer.score(read(batches), _place() if placed else None):
        arrays = list(convert(outputs))
        yield arrays[0] if len(arrays) == 1 else pa.StructArray.from_arrays(arrays, list(names))
    _warn(scorer)


def _warn(scorer: Scorer) -> None:
    failures = getattr(scorer, "failures", None)
    if failures is not None and failures.count:
        warnings.warn(f"in this task, {failures}", RowErrorsWarning, stacklevel=2)


def _received(scorer: Scorer, batches: Iterable[Any], *, numbered: bool) -> Iterator[Arrays]:
    columns = scorer.columns
    for batch in batches:
        # Spark hands over the only argument of a function by itself.
        arrays = list(batch) if isinstance(batch, tuple) else [batch]
        ids = arrays.pop().to_numpy() if numbered else np.full(len(arrays[0]), UNNUMBERED)
        if len(arrays) != len(columns.names):
            raise ConfigError(
                f"this function takes {len(columns.names)} columns, {', '.join(columns.names)}; it was"
                f" called with {len(arrays)}."
            )
        rows = pa.RecordBatch.from_arrays(arrays, names=list(columns.names))
        yield features_of(columns, rows, Where(ids), lenient=scorer.lenient)


def _read(scorer: Scorer, stored: StoredColumns, batches: Iterable[tuple[pa.Array, ...]]) -> Iterator[Arrays]:
    columns = scorer.columns
    with ExitStack() as opened:
        reader, path = None, None
        for files, numbers in batches:
            for file, start, stop in _runs(files, numbers.to_numpy()):
                if reader is None or file != path:
                    opened.close()
                    # Spark names files by percent-encoded URI.
                    place = local_path(file) if file.startswith("file:") else file
                    reader = RowReader(place, columns.names, stored.problem)
                    path = file
                    opened.enter_context(reader)
                rows = reader.read(start, stop)
                yield features_of(columns, rows, partial(add, start), lenient=scorer.lenient)


def _place() -> TaskPlace:
    context = TaskContext.get()
    return TaskPlace(0) if context is None else TaskPlace(context.partitionId(), tuple(task_gpus(context)))


def _runs(files: pa.Array, numbers: np.ndarray[Any, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield (file, first, last + 1) for runs of consecutive rows."""
    codes = files.dictionary_encode()
    index = codes.indices.to_numpy()
    breaks = np.flatnonzero((np.diff(numbers) != 1) | (np.diff(index) != 0)) + 1
    edges = [0, *breaks.tolist(), len(numbers)]
    for begin, end in pairwise(edges):
        if end > begin:
            yield str(codes.dictionary[int(index[begin])]), int(numbers[begin]), int(numbers[end - 1]) + 1
