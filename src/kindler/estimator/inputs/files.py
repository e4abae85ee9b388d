"""Parquet files, by their paths: workers read them themselves, and scored rows go to files again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pyarrow as pa

from kindler.data import parquet
from kindler.data.column_options import ColumnOptions
from kindler.data.columns import Array, Columns
from kindler.data.sources import ParquetSource, parquet_source
from kindler.engine import local
from kindler.errors import ConfigError, DataError
from kindler.estimator.inputs.contract import Input, Prepared, ScoreRequest, SourceRequest
from kindler.estimator.inputs.samples import RowCounter, repeated_row
from kindler.files import beside
from kindler.inference.files import FileTask
from kindler.inference.outputs import refuse_taken
from kindler.train.options import PredictOptions
from kindler.train.progress import ProgressBar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class ParquetInput(Input):
    """A Parquet path or a list of them. Scoring writes a Parquet dataset and gives its path."""

    @staticmethod
    def accepts(data: Any) -> bool:
        if isinstance(data, list):
            return bool(data) and all(isinstance(item, str | os.PathLike) for item in data)
        return isinstance(data, str | os.PathLike)

    def source(self, request: SourceRequest) -> Prepared:
        return not_empty(
            parquet_source(parquet.inspect(self.data, opener(request.spark)), request.columns)
        ), None

    def sample(self, options: ColumnOptions, layout: Mapping[str, Any]) -> tuple[Columns, list[Array]]:
        files = parquet.inspect(self.data)
        columns = not_empty(parquet_source(files, options)).columns
        first = next(iter(parquet.scan(files, columns.names, 0, 1)))
        return columns, repeated_row(pa.Table.from_batches([first]), columns)

    def score_complaints(self, options: PredictOptions) -> list[str]:
        if options.output_path is not None:
            return []
        complaint = (
            f"predict({self.data!r}): the scored rows of Parquet files are written to files.\n"
            "Hint: pass output_path=..., or read the files with Spark and score the DataFrame."
        )
        return [complaint]

    def score(self, request: ScoreRequest) -> str:
        """All columns with the outputs appended, in the order of the rows."""
        options = request.options
        target = Path(options.output_path or "").absolute()
        if target.exists():
            raise ConfigError(
                f"output_path={str(options.output_path)!r} exists already; it is not overwritten."
            )
        files = parquet.inspect(self.data)
        source = parquet_source(files, options.columns)
        refuse_taken(options.output_cols or ("prediction",), parquet.schema(files).names)
        with beside(target) as unfinished:
            unfinished.mkdir()
            task = FileTask(predictor=request.predictor(source.columns), files=files, folder=str(unfinished))
            with ProgressBar(verbose=options.verbose, what="predict", unit="rows") as progress:
                job = replace(request.job, buffers=(cloudpickle.dumps(task),))
                local.run(job, listener=RowCounter(progress, files.rows))
        return str(target)


def opener(spark: SparkSession | None) -> parquet.EachFile | None:
    """Opens the footers of files in Spark tasks, where the workers run in Spark; else None."""
    if spark is None:
        return None
    from kindler.spark.tasks import each_file

    return partial(each_file, spark)


def not_empty(source: ParquetSource) -> ParquetSource:
    if not source.files.rows:
        raise DataError("the data has no rows.")
    return source
