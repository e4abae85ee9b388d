"""Data in Spark: DataFrames, classic and Connect, and the rows that SQL hands to a function."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from kindler.data.arrays import is_spark_frame
from kindler.data.batches import inputs
from kindler.data.sources import DeliveredSource, ParquetSource, arrow_source
from kindler.data.statistics import Summary, columns_of, described, merged
from kindler.errors import ConfigError
from kindler.estimator.inputs.contract import (
    SAMPLE_ROWS,
    Input,
    Prepared,
    ScoreRequest,
    SourceRequest,
    repeated_row,
    zeros,
)
from kindler.estimator.inputs.local import not_empty
from kindler.frameworks.caller_state import untouched
from kindler.frameworks.registry import FRAMEWORKS
from kindler.inference.outputs import refuse_taken, to_arrow, to_columns

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kindler.config import Ingest
    from kindler.data.column_options import ColumnOptions
    from kindler.data.columns import Array, ColumnPlan
    from kindler.data.tables import Table
    from kindler.inference.predictor import Predictor
    from kindler.spark.direct import PlainScan


class FrameInput(Input):
    """A Spark DataFrame. Scoring returns a lazy DataFrame, batch or streaming."""

    engine = "spark"
    name = "frame"

    def __init__(self, data: Any) -> None:
        from kindler.spark.versions import require_pyspark

        require_pyspark("a Spark DataFrame")
        super().__init__(data)

    @staticmethod
    def accepts(data: Any) -> bool:
        return is_spark_frame(data)

    def session(self) -> SparkSession:
        session: SparkSession = self.data.sparkSession
        return session

    def describe(self) -> dict[str, Any]:
        from kindler.spark.direct import plan_of

        return {"plan": plan_of(self.data), "paths": self.data.inputFiles()}

    def split(self, share: float, seed: int) -> tuple[Input, Input]:
        training, held_out = self.data.randomSplit([1.0 - share, share], seed=seed)
        return FrameInput(training), FrameInput(held_out)

    def source(self, request: SourceRequest) -> Prepared:
        from kindler.spark.frames import Feed, collected

        frame, (columns, _) = self.data, self.plan(request.columns)
        scan = self._scan(columns, request.ingest)
        if scan is not None:
            return not_empty(ParquetSource(scan.files, columns)), None
        if request.spark is None:
            table = collected(frame, columns.names)
            return arrow_source(table, request.columns, scratch=request.scratch), None
        return DeliveredSource(columns, request.name), Feed(name=request.name, frame=frame, columns=columns)

    def sample(self, options: ColumnOptions, layout: Mapping[str, Any]) -> tuple[ColumnPlan, list[Array]]:
        columns, types = self.plan(options)
        return columns, zeros(columns, layout, types) or self.first_row(columns)

    def summaries(self, known: Collection[str], columns: ColumnOptions) -> dict[str, Summary]:
        from kindler.spark.frames import column
        from kindler.spark.tasks import sent_task
        from kindler.spark.versions import to_arrow

        frame, wanted = self.data, columns_of(known)
        if frame.isStreaming:
            raise ConfigError(
                "drift needs rows that end; received a streaming DataFrame.\n"
                "Hint: call it in foreachBatch, on each batch."
            )
        names = [name for name in frame.columns if name in wanted]
        if not names:
            return {}
        task = sent_task(partial(_summaries, tuple(names), frozenset(known)))
        table = to_arrow(frame.select(*map(column, names)).mapInArrow(task, "summaries string"))
        parts = [json.loads(part) for part in table.column("summaries").to_pylist()]
        return merged([{n: Summary.from_json(one) for n, one in part.items()} for part in parts])

    def score(self, request: ScoreRequest) -> Any:
        from kindler.spark.executors import check_executors
        from kindler.spark.tasks import lent

        frame = self.data
        check_executors(frame.sparkSession, FRAMEWORKS.spec(request.framework).package)
        columns, types = self.plan(request.options.columns)
        predictor = request.predictor(columns, threads=1)
        scan = self._scan_to_score(columns, request.options.ingest)
        if predictor.lenient:

            def first() -> Mapping[str, Any]:
                table = self.first_rows(columns, SAMPLE_ROWS)
                return dict(zip(table.column_names, table.columns, strict=True))

            predictor, sample = request.knowing(predictor, types, first), []
        else:
            # A transform may not take zeros: it is tried on a row of the data, unless there is none yet.
            prepares = request.preparation(columns) is not None and not frame.isStreaming
            sample = (None if prepares else zeros(columns, request.layout, types)) or self.first_row(columns)
        names, types_of_outputs = _tried(predictor, columns, sample)
        scorer = predictor.lent(partial(lent, frame.sparkSession))
        return self.scored(scorer, names, types_of_outputs, scan.columns if scan is not None else None)

    def scored(self, scorer: Any, names: Sequence[str], types: list[pa.DataType], stored: Any = None) -> Any:
        """The frame with what a scorer makes of its rows, as columns of these names and types."""
        from kindler.spark.predict import predict_frame

        frame = self.data
        folded = {column.lower() for column in frame.columns}  # Spark would replace one by the other
        refuse_taken(names, [*frame.columns, *(name for name in names if name.lower() in folded)])
        return predict_frame(
            frame, scorer, names=names, types=types, convert=partial(to_columns, types), stored=stored
        )

    def plan(self, options: ColumnOptions) -> tuple[ColumnPlan, Mapping[str, Any]]:
        from kindler.spark.frames import arrow_types, refuse_ambiguous

        types = arrow_types(self.data)
        columns = options.plan(types)
        refuse_ambiguous(self.data, columns.names)
        return columns, types

    def _scan(self, columns: ColumnPlan, ingest: Ingest) -> PlainScan | None:
        from kindler.spark.direct import plain_parquet

        if ingest == "inline":
            return None
        return plain_parquet(self.data, columns.names, must=ingest == "direct")

    def _scan_to_score(self, columns: ColumnPlan, ingest: Ingest) -> PlainScan | None:
        from kindler.spark.versions import takes_columns

        spark = self.session()
        if takes_columns(spark):
            return self._scan(columns, ingest)
        if ingest == "direct":
            raise ConfigError(
                f"predict: ingest='direct' needs Spark 4.1 or newer, and this is Spark {spark.version}, whose"
                " Python functions take whole rows.\nHint: ingest='auto'."
            )
        return None

    def first_row(self, columns: ColumnPlan) -> list[Array]:
        # The schema does not say how wide columns are.
        return repeated_row(self.first_rows(columns, 1), columns)

    def first_rows(self, columns: ColumnPlan, rows: int) -> pa.Table:
        from kindler.spark.frames import collected

        if self.data.isStreaming:
            if any(column.ragged for column in columns.features):
                raise ConfigError(
                    "what a transform returns for a stream's rows is unknown until rows arrive.\n"
                    "Hint: score each batch of the stream:"
                    " stream.writeStream.foreachBatch(lambda rows, number: estimator.predict(rows)...)."
                )
            raise ConfigError(
                "the width of a stream's columns is unknown until rows arrive.\n"
                "Hint: pass columns=Columns(shapes={column: (width,)}), or fit() on such columns first."
            )
        return collected(self.data, columns.names, rows=rows)


class TableInput(FrameInput):
    """A table that only Spark can read, at its version."""

    name = "table"

    def __init__(self, table: Table, spark: SparkSession) -> None:
        from kindler.spark.frames import table_frame

        super().__init__(table_frame(spark, table))
        self._table = table

    def describe(self) -> dict[str, Any]:
        asked = {"format": self._table.resolved_format(), "uri": self._table.place()}
        return {**super().describe(), "tables": [self._table.chosen or asked]}


def _summaries(
    names: Sequence[str], known: Collection[str], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    parts = [described(dict(zip(names, batch.columns, strict=True)), known) for batch in batches]
    whole = {name: one.to_json() for name, one in merged(parts).items()}
    yield pa.RecordBatch.from_pydict({"summaries": [json.dumps(whole)]})


class SqlFunctionInput(Input):
    """The arguments of a SQL function. Scoring it registers the function."""

    engine = "spark"

    def __init__(self, spark: SparkSession, name: str) -> None:
        super().__init__(name)
        self._spark = spark

    def sample(self, options: ColumnOptions, layout: Mapping[str, Any]) -> tuple[ColumnPlan, list[Array]]:
        names = options.features or [name for name in ("features", "x") if name in layout][:1]
        if not names:
            raise ConfigError(
                "register_udf: which columns does the model take?\n"
                "Hint: pass feature_cols=[...], in the order of the function's arguments, or fit() first."
            )
        types = {name: _type(*layout[name]) if name in layout else None for name in names}
        columns = replace(options, feature_cols=names).within(names).plan(types)  # shapes of labels aside
        sample = zeros(columns, layout, types)
        if sample is None:
            raise ConfigError(
                "register_udf: the width of the model's columns, or what a transform returns for them, "
                "is unknown until rows arrive.\n"
                "Hint: pass columns=Columns(shapes={column: (width,)}), or fit() first; an estimator with a"
                " transform scores DataFrames with predict()."
            )
        return columns, sample

    def score(self, request: ScoreRequest) -> Any:
        from kindler.spark.executors import check_executors
        from kindler.spark.predict import check_name, register_function
        from kindler.spark.tasks import lent

        spark, name = self._spark, self.data
        check_name(name)
        check_executors(spark, FRAMEWORKS.spec(request.framework).package)
        columns, sample = self.sample(request.options.columns, request.layout)
        if request.preparation(columns) is not None:
            raise ConfigError(
                "register_udf: this estimator has a transform, which scores DataFrames with predict() only."
            )
        predictor = request.predictor(columns, threads=1)
        names, types = _tried(predictor, columns, sample)
        return register_function(
            spark,
            name,
            predictor.lent(partial(lent, spark)),
            names=names,
            types=types,
            convert=partial(to_columns, types),
        )


def _tried(
    predictor: Predictor, columns: ColumnPlan, sample: list[Array]
) -> tuple[Sequence[str], list[pa.DataType]]:
    if predictor.output_cols is not None and (types := predictor.added_types) is not None:
        return predictor.names(len(types)), types
    here = predictor.with_threads(None)  # the driver is not bound by the threads of an executor
    with untouched():
        outputs = next(here.score([inputs(columns, sample)]))
    return here.names(len(outputs)), [to_arrow(output).type for output in outputs]


def _type(dtype: str | None, shape: Any) -> pa.DataType | None:
    if dtype is None or shape is None:
        return None
    if dtype in ("str", "bytes"):
        return pa.string() if dtype == "str" else pa.binary()
    kind = pa.from_numpy_dtype(np.dtype(dtype))
    for _ in shape:
        kind = pa.list_(kind)
    return kind
