"""Data in this process: arrays, pandas, Arrow, and datasets of other libraries as Arrow tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from kindler.data import datasets
from kindler.data.batches import inputs
from kindler.data.columns import Array, Column
from kindler.data.ragged import Ragged
from kindler.data.sources import DeliveredSource, FolderSource, arrow_source, is_local_data
from kindler.data.spool import Spool
from kindler.estimator.inputs.contract import Input, Prepared, ScoreRequest, SourceRequest
from kindler.inference.outputs import like, refuse_taken, to_arrow
from kindler.inference.predictor import Predictor
from kindler.temporary import Folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["DatasetInput", "MemoryInput"]


class MemoryInput(Input):
    """Arrays, a pandas DataFrame or an Arrow table. Scoring gives the same kind back."""

    @staticmethod
    def accepts(data: Any) -> bool:
        return is_local_data(data)

    @property
    def rows(self) -> Any:
        """The data as `arrow_source` takes it."""
        return self.data

    def source(self, request: SourceRequest) -> Prepared:
        here = arrow_source(self.rows, request.columns, scratch=request.scratch)
        if request.spark is None or request.shares_files:
            return here, None
        return _shipped(here, request.name, request.spark)

    def score(self, request: ScoreRequest) -> Any:
        rows, options = self.rows, request.options
        with Folder("kindler-driver-") as folder:
            source = arrow_source(rows, options.columns, scratch=folder)
            spool, columns = Spool.open(source.folder), source.columns
            arrays = [spool.arrays[column.name] for column in columns.features]
            predictor = request.predictor(columns)
            chunks = (
                inputs(columns, [_copied(array, start, start + options.batch_size) for array in arrays])
                for start in range(0, spool.rows, options.batch_size)
            )
            parts = list(predictor.score(chunks))
            outputs = [np.concatenate(column) for column in zip(*parts, strict=True)]
        by_name = dict(zip(predictor.names(len(outputs)), outputs, strict=True))
        return self._scored(rows, by_name, predictor)

    def _scored(self, rows: Any, outputs: Mapping[str, Array], predictor: Predictor) -> Any:
        return like(rows, dict(outputs), named=predictor.outputs_are_named())


class DatasetInput(MemoryInput):
    """A Hugging Face or ray dataset. Scoring gives a Hugging Face dataset back, for ray an Arrow table."""

    @staticmethod
    def accepts(data: Any) -> bool:
        return datasets.is_dataset(data)

    @property
    def rows(self) -> pa.Table:
        return datasets.table(self.data)

    def _scored(self, rows: pa.Table, outputs: Mapping[str, Array], predictor: Predictor) -> Any:
        refuse_taken(outputs, rows.schema.names)
        return datasets.with_columns(self.data, rows, {name: to_arrow(out) for name, out in outputs.items()})


def _copied(array: Any, start: int, stop: int) -> Any:
    part = slice(start, stop)
    return array.take(part) if isinstance(array, Ragged) else np.array(array[part])


def _shipped(source: FolderSource, name: str, spark: SparkSession) -> Prepared:
    """Rows of the driver for workers elsewhere: Spark sends them, each packed into bytes."""
    from kindler.spark.frames import Feed, packed_frame

    arrays = Spool.open(source.folder).arrays

    def packed(column: Column) -> Column:
        array = arrays[column.name]
        if isinstance(array, Ragged):
            return column
        return replace(column, dtype=array.dtype.name, shape=array.shape[1:])

    columns = replace(
        source.columns,
        features=tuple(map(packed, source.columns.features)),
        labels=tuple(map(packed, source.columns.labels)),
        others=tuple(map(packed, source.columns.others)),
    )
    frame = packed_frame(spark, {column.name: arrays[column.name] for column in columns.all})
    return DeliveredSource(columns, name), Feed(name=name, frame=frame, columns=columns)
