"""Data in this process: arrays, pandas, Arrow, and datasets of other libraries as Arrow tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from kindler.data.arrays import dataset_table, is_dataset, is_local_data, named, with_columns
from kindler.data.batches import inputs
from kindler.data.column_options import ColumnOptions
from kindler.data.columns import Array, Column, Columns, conform
from kindler.data.ragged import Ragged
from kindler.data.sources import (
    DeliveredSource,
    FolderSource,
    arrow_source,
    columns_in_memory,
    spooled,
)
from kindler.data.spool import Spool
from kindler.estimator.inputs.contract import Input, Prepared, ScoreRequest, SourceRequest
from kindler.estimator.inputs.samples import few_rows
from kindler.frameworks.caller_state import untouched
from kindler.frameworks.registry import FRAMEWORKS
from kindler.inference.outputs import like, refuse_taken, to_arrow
from kindler.inference.predictor import Predictor
from kindler.temporary import Folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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

    def sample(self, options: ColumnOptions, layout: Mapping[str, Any]) -> tuple[Columns, list[Array]]:
        found = named(self.rows).called(options.features, None)
        if options.feature_cols is None:
            options = replace(options, feature_cols=found.features)
        columns = options.plan(found.types)
        return columns, few_rows(found.columns, columns)

    def score(self, request: ScoreRequest) -> Any:
        rows, options = self.rows, request.options
        columns, given, count = columns_in_memory(rows, options.columns)
        predictor = request.predictor(columns)
        with ExitStack() as stack:
            parts_of: Callable[[slice], list[Any]]
            plain = all(isinstance(given[column.name], np.ndarray) for column in columns.features)
            if plain and options.columns.ragged is None:
                lent = FRAMEWORKS.load(request.framework).takes_read_only
                parts_of = partial(_conformed, columns, given, lent=lent)
            else:
                folder = stack.enter_context(Folder("kindler-driver-"))
                spool = Spool.open(spooled(columns, given, count, scratch=folder).folder)
                parts_of = partial(_spooled, columns, spool)
            chunks = (
                inputs(columns, parts_of(slice(start, min(start + options.batch_size, count))))
                for start in range(0, count, options.batch_size)
            )
            scored = predictor.score(chunks)
            with untouched():  # the first batch makes the model
                first = list(islice(scored, 1))
            parts = [*first, *scored]
            outputs = [np.concatenate(column) for column in zip(*parts, strict=True)]
        by_name = dict(zip(predictor.names(len(outputs)), outputs, strict=True))
        return self._scored(rows, by_name, predictor)

    def _scored(self, rows: Any, outputs: Mapping[str, Array], predictor: Predictor) -> Any:
        return like(rows, dict(outputs), named=predictor.outputs_are_named())


class DatasetInput(MemoryInput):
    """A Hugging Face or ray dataset. Scoring gives a Hugging Face dataset back, for ray an Arrow table."""

    @staticmethod
    def accepts(data: Any) -> bool:
        return is_dataset(data)

    @property
    def rows(self) -> pa.Table:
        return dataset_table(self.data)

    def _scored(self, rows: pa.Table, outputs: Mapping[str, Array], predictor: Predictor) -> Any:
        refuse_taken(outputs, rows.schema.names)
        return with_columns(self.data, rows, {name: to_arrow(out) for name, out in outputs.items()})


def _conformed(columns: Columns, given: Mapping[str, Array], rows: slice, *, lent: bool) -> list[Array]:
    """Rows of arrays: copies, since a model may write to them, or views that nobody may write to."""
    parts = []
    for column in columns.features:
        part = conform(given[column.name][rows], column, where=lambda row: rows.start + row).view()
        part.flags.writeable = False
        parts.append(part if lent else np.array(part))
    return parts


def _spooled(columns: Columns, spool: Spool, rows: slice) -> list[Any]:
    arrays = [spool.arrays[column.name] for column in columns.features]
    return [array.take(rows) if isinstance(array, Ragged) else np.array(array[rows]) for array in arrays]


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
