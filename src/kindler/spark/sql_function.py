"""A model as a function of SQL: its arguments are the model's columns, in their order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField, StructType

from kindler.data.rejoin import features_of
from kindler.errors import ConfigError
from kindler.spark.predict import Convert, Scorer
from kindler.spark.sent_tasks import Task, sent_task
from kindler.spark.versions import takes_columns
from kindler.spark.zip_folders import forget_zip_folders

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_name(name: str) -> None:
    """Refuse what cannot be called in SQL.

    Raises:
        ConfigError: It is not a plain name.
    """
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
    """Register a model under a name; gives the function that makes a column of columns.

    Args:
        spark: The session.
        name: The function's name; one of this name is replaced.
        scorer: The model.
        names: What its outputs are called: the fields of a struct, where there are several.
        types: Their Arrow types.
        convert: Makes an Arrow column of an output.
    """
    fields = [StructField(one, from_arrow_type(kind)) for one, kind in zip(names, types, strict=True)]
    result = fields[0].dataType if len(fields) == 1 else StructType(fields)
    work = sent_task(_ScoreArguments(scorer=scorer, names=tuple(names), convert=convert))
    function: Callable[..., Any] = spark.udf.register(name, _udf(spark, work, result))
    return function


def _udf(spark: SparkSession, work: Task[Any, pa.Array], result: Any) -> Any:
    if takes_columns(spark):
        from pyspark.sql.pandas.functions import arrow_udf

        # Spark reads from the annotations how rows come in: batches, each an array for each argument.
        def score(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
            return work(batches)

        make: Any = arrow_udf
        return make(score, result)
    return _pandas_udf(work, result)


def _pandas_udf(work: Task[Any, pa.Array], result: Any) -> Any:
    """Before Spark 4.1 the columns come as series of pandas."""
    import pandas as pd
    from pyspark.sql.pandas.functions import pandas_udf

    many = isinstance(result, StructType)
    given: Any = pd.DataFrame if many else pd.Series

    def score(batches: Any) -> Any:
        for scored in work(map(_arrow, batches)):
            yield pd.DataFrame(scored.to_pylist()) if many else pd.Series(scored.to_pylist())

    # Spark reads from the annotations how rows come in.
    series: Any = pd.Series
    score.__annotations__ = {"batches": Iterator[tuple[series, ...]], "return": Iterator[given]}
    make: Any = pandas_udf
    return make(score, result)


def _arrow(batch: Any) -> tuple[pa.Array, ...]:
    columns = batch if isinstance(batch, tuple) else (batch,)
    return tuple(pa.Array.from_pandas(column) for column in columns)


@dataclass(frozen=True, kw_only=True)
class _ScoreArguments:
    """What runs in Spark's Python workers, once per partition."""

    scorer: Scorer
    names: tuple[str, ...]
    convert: Convert

    def __call__(self, batches: Iterator[Any]) -> Iterator[pa.Array]:
        forget_zip_folders()
        for outputs in self.scorer.score(self._features(batches)):
            arrays = [self.convert(output) for output in outputs]
            yield arrays[0] if len(arrays) == 1 else pa.StructArray.from_arrays(arrays, list(self.names))

    def _features(self, batches: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
        columns = self.scorer.columns
        for batch in batches:
            # Spark hands over the only argument of a function by itself.
            arrays = batch if isinstance(batch, tuple) else (batch,)
            if len(arrays) != len(columns.names):
                raise ConfigError(
                    f"this function takes {len(columns.names)} columns, {', '.join(columns.names)}; it was"
                    f" called with {len(arrays)}."
                )
            rows = pa.RecordBatch.from_arrays(list(arrays), names=list(columns.names))
            yield features_of(columns, rows, lambda row: f"{row} of its batch")
