"""Scoring a Spark DataFrame: a lazy column, computed where the rows are.

Only the model's columns cross to Python, as Arrow. Where the frame is nothing but a Parquet scan, not
even those: Spark sends each row's file and number, and Python reads the columns itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol
from urllib.parse import unquote, urlparse

import numpy as np
import pyarrow as pa
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField, StructType

from kindler.data.alongside import Alongside, features_of
from kindler.data.columns import Columns
from kindler.data.parquet import RowReader
from kindler.errors import ConfigError

__all__ = ["Scorer", "first_row", "predict_frame"]

Arrays = tuple[np.ndarray[Any, Any], ...]
Convert = Callable[[np.ndarray[Any, Any]], pa.Array]

_STRUCT = "_kindler_outputs"


class Scorer(Protocol):
    """What scores: a value that travels to the executors."""

    @property
    def columns(self) -> Columns: ...
    def score(self, chunks: Iterable[Arrays]) -> Iterator[list[np.ndarray[Any, Any]]]: ...


def predict_frame(
    frame: DataFrame,
    scorer: Scorer,
    *,
    names: Sequence[str],
    types: Sequence[pa.DataType],
    convert: Convert,
    direct: bool,
) -> DataFrame:
    """`frame` with the model's outputs appended, in the frame's own order.

    Args:
        frame: Any frame, batch or streaming.
        scorer: The model.
        names: The columns to append.
        types: Their Arrow types.
        convert: Makes an Arrow column of an output.
        direct: The frame is a plain Parquet scan whose files Python may read itself.
    """
    taken = [name for name in names if name in frame.columns]
    if taken:
        raise ConfigError(
            f"the frame already has {taken}; predictions would overwrite them.\n"
            "Hint: predict(..., output_cols=[...]) gives them other names."
        )
    fields = [StructField(name, from_arrow_type(kind)) for name, kind in zip(names, types, strict=True)]
    if not hasattr(F, "arrow_udf"):
        return _through_rows(frame, scorer, fields, convert)
    single = len(names) == 1
    result = fields[0].dataType if single else StructType(fields)
    sent = _where_rows_are() if direct else [F.col(f"`{n}`") for n in scorer.columns.names]
    work = _Score(scorer=scorer, names=tuple(names), convert=convert, direct=direct)
    scored = _arrow_udf(work, result, single=len(sent) == 1)(*sent)
    if single:
        return frame.withColumn(names[0], scored)
    whole = frame.withColumn(_STRUCT, scored)
    kept, added = [f"`{column}`" for column in frame.columns], [f"{_STRUCT}.`{name}`" for name in names]
    return whole.select(*map(F.col, [*kept, *added]))


def _through_rows(
    frame: DataFrame, scorer: Scorer, fields: Sequence[StructField], convert: Convert
) -> DataFrame:
    """Before Spark 4.1 a function of Arrow columns must take the whole row along."""
    names = [field.name for field in fields]

    def score(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = Alongside(scorer.columns)
        scored = scorer.score(rows.features(batches))
        for table in rows.joined(scored, names=lambda outputs: names, convert=convert):
            yield from table.to_batches()

    return frame.mapInArrow(score, StructType([*frame.schema.fields, *fields]))


def first_row(frame: DataFrame, columns: Columns) -> pa.Table:
    """One row of the model's columns: how wide they are is not in the schema."""
    return frame.select(*[F.col(f"`{name}`") for name in columns.names]).limit(1).toArrow()


def _where_rows_are() -> list[SparkColumn]:
    return [F.col("_metadata.file_path"), F.col("_metadata.row_index")]


def _arrow_udf(work: _Score, result: Any, *, single: bool) -> Callable[..., SparkColumn]:
    """Spark reads from the annotations how rows come in: one array a batch, or a tuple of them."""

    from pyspark.sql.pandas.functions import arrow_udf

    def of_one(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        return work((batch,) for batch in batches)

    def of_many(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        return work(batches)

    function: Any = of_one if single else of_many
    made: Callable[..., SparkColumn] = arrow_udf(function, result)
    return made


@dataclass(frozen=True, kw_only=True)
class _Score:
    """What runs in Spark's Python workers, once per partition."""

    scorer: Scorer
    names: tuple[str, ...]
    convert: Convert
    direct: bool

    def __call__(self, batches: Iterable[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        chunks = self._read(batches) if self.direct else self._received(batches)
        for outputs in self.scorer.score(chunks):
            arrays = [self.convert(output) for output in outputs]
            yield arrays[0] if len(arrays) == 1 else pa.StructArray.from_arrays(arrays, list(self.names))

    def _received(self, batches: Iterable[tuple[pa.Array, ...]]) -> Iterator[Arrays]:
        row = 0
        columns = self.scorer.columns
        for batch in batches:
            rows = pa.RecordBatch.from_arrays(list(batch), names=list(columns.names))
            yield features_of(columns, rows, row)
            row += len(rows)

    def _read(self, batches: Iterable[tuple[pa.Array, ...]]) -> Iterator[Arrays]:
        """The model's columns of the rows that Spark names, read from the file they are in."""
        with ExitStack() as opened:
            reader, path = None, None
            for files, numbers in batches:
                for file, start, stop in _runs(files, numbers.to_numpy()):
                    if reader is None or file != path:
                        opened.close()
                        reader, path = RowReader(_local(file), self.scorer.columns.names), file
                        opened.enter_context(reader)
                    yield features_of(self.scorer.columns, reader.read(start, stop), start)


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
