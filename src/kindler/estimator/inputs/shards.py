"""XShards: trained on where they are, and scored into shards beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from kindler.data.batches import inputs
from kindler.data.column_options import ColumnOptions
from kindler.data.columns import Array, ColumnPlan, conform
from kindler.data.shards.codec import pack
from kindler.data.shards.source import values
from kindler.engine.placement import usable_cores
from kindler.errors import DataError
from kindler.estimator.inputs.contract import (
    PROBE_ROWS,
    SAMPLE_ROWS,
    Input,
    Prepared,
    RowCounter,
    ScoreRequest,
    SourceRequest,
    repeated_row,
    zeros,
)
from kindler.inference.shards import ShardScorer
from kindler.train.progress import ProgressBar
from kindler.xshards import XShards, as_input

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class ShardsInput(Input):
    data: XShards
    name = "shards"

    def __init__(self, data: XShards) -> None:
        super().__init__(data)
        self.engine = "spark" if data.engine == "spark" else "local"

    @staticmethod
    def accepts(data: Any) -> bool:
        return isinstance(data, XShards)

    def session(self) -> SparkSession | None:
        return as_input.session(self.data)

    def complete(self, columns: ColumnOptions, known: ColumnOptions) -> ColumnOptions:
        """A model that was fitted on columns of other names still takes the `x` of shards that have one."""
        offer = as_input.offer(self.data)
        return columns.or_else(known if offer.features is None else known.within(offer.types))

    def source(self, request: SourceRequest) -> Prepared:
        return as_input.prepare(
            self.data,
            name=request.name,
            options=self._validating(request.columns) if request.name == "validation" else request.columns,
            spark=request.spark,
            here=request.shares_files,
        )

    def _validating(self, columns: ColumnOptions) -> ColumnOptions:
        """The `x` and `y` of shards stand for training columns of other names, in order."""
        offered = as_input.offer(self.data)
        if offered.features is None or set(columns.features or ()) <= set(offered.types):
            return columns
        return columns.renamed(offered.features, offered.labels or ())

    def sample(self, options: ColumnOptions, layout: Mapping[str, Any]) -> tuple[ColumnPlan, list[Array]]:
        chosen = as_input.choose(self.data, options)
        rows = _rows(self.data, chosen, layout)
        if rows is None:
            raise DataError("the shards have no rows, so the width of their columns is unknown.")
        return chosen.columns, rows

    def score(self, request: ScoreRequest) -> XShards:
        shards, job = self.data, request.job
        chosen = as_input.choose(shards, request.options.columns)
        threads = 1
        if shards.engine == "local":
            threads = job.threads or max(1, usable_cores() // min(job.size, shards.num_partitions()))
        predictor = request.predictor(chosen.columns, threads=threads)
        if (spark := self.session()) is not None:
            from kindler.spark.tasks import lent

            predictor = predictor.lent(partial(lent, spark))
        prepares = request.preparation(chosen.columns) is not None
        sample = _sample(shards, chosen, request.layout, prepares=prepares)
        if predictor.lenient and len(shards):
            types = {} if chosen.schema is None else {field.name: field.type for field in chosen.schema}
            first = partial(_first, shards, chosen)
            predictor = request.knowing(predictor, defaultdict(lambda: None, types), first)
        scorer = ShardScorer(predictor=predictor, schema=chosen.schema, sample=sample)
        with ProgressBar(verbose=request.options.verbose, what="predict", unit="rows") as progress:
            return as_input.worked(shards, scorer, job, RowCounter(progress, len(shards)))


def _first(shards: XShards, chosen: as_input.Chosen) -> Mapping[str, Any]:
    return values(pack(shards.head(SAMPLE_ROWS)), chosen.columns.names, chosen.schema)


def _sample(
    shards: XShards, chosen: as_input.Chosen, layout: Mapping[str, Any], *, prepares: bool
) -> tuple[Array, ...] | None:
    if as_input.all_have_rows(shards):
        return None
    rows = _rows(shards, chosen, layout, prepares=prepares)
    return None if rows is None else inputs(chosen.columns, rows)


def _rows(
    shards: XShards, chosen: as_input.Chosen, layout: Mapping[str, Any], *, prepares: bool = False
) -> list[Array] | None:
    columns = chosen.columns
    if chosen.schema is None:
        given = [(chosen.arrays[c.name].shape, chosen.arrays[c.name].dtype, c) for c in columns.features]
        return [conform(np.zeros((PROBE_ROWS, *s), dtype), c, where=str) for s, dtype, c in given]
    types = {field.name: field.type for field in chosen.schema}
    sample = None if prepares else zeros(columns, layout, types)
    if sample is None and len(shards):
        row = values(pack(shards.head(1)), columns.names, chosen.schema)
        sample = repeated_row(pa.table(row), columns)
    return sample
