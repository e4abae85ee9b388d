"""Rows that SQL will hand to a function: only the columns that the model was trained on are known of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from kindler.data.batches import inputs
from kindler.errors import ConfigError
from kindler.estimator.inputs.contract import Input, Prepared, ScoreRequest, SourceRequest
from kindler.estimator.inputs.samples import zeros
from kindler.frameworks.caller_state import untouched
from kindler.frameworks.registry import FRAMEWORKS
from kindler.inference.outputs import arrow_type, to_arrow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kindler.data.column_options import ColumnOptions
    from kindler.data.columns import Array, Columns

_DEFAULTS = ("features", "x")


@dataclass(frozen=True)
class SqlFunction:
    """A function's name, in a session."""

    spark: SparkSession
    name: str


class SqlFunctionInput(Input):
    """What a function of SQL is called with. Scoring it registers the function."""

    engine = "spark"

    @staticmethod
    def accepts(data: Any) -> bool:
        return isinstance(data, SqlFunction)

    def source(self, request: SourceRequest) -> Prepared:
        raise ConfigError("a function of SQL has no rows to train on.")

    def sample(self, options: ColumnOptions, layout: Mapping[str, Any]) -> tuple[Columns, list[Array]]:
        names = options.features or [name for name in _DEFAULTS if name in layout][:1]
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
                "register_udf: how wide the model's columns are, or what a transform makes of them, is"
                " unknown before rows arrive.\n"
                "Hint: give shapes={column: (width,)}, or fit() first; an estimator with a transform scores"
                " DataFrames with predict()."
            )
        return columns, sample

    def score(self, request: ScoreRequest) -> Any:
        from kindler.spark.executors import check_executors
        from kindler.spark.predict import check_name, register_function
        from kindler.spark.tasks import lent

        spark, name = self.data.spark, self.data.name
        check_name(name)
        check_executors(spark, FRAMEWORKS.spec(request.framework).package)
        columns, sample = self.sample(request.options.columns, request.layout)
        if request.preparation(columns) is not None:
            raise ConfigError(
                "register_udf: this estimator has a transform, which scores DataFrames with predict() only."
            )
        predictor = request.predictor(columns, threads=1)
        tried = predictor.with_threads(None)  # the driver is not bound by the threads of an executor
        with untouched():
            outputs = next(tried.score([inputs(columns, sample)]))
        return register_function(
            spark,
            name,
            predictor.lent(partial(lent, spark)),
            names=tried.names(len(outputs)),
            types=[arrow_type(output.dtype, output.ndim) for output in outputs],
            convert=to_arrow,
        )


def _type(dtype: str | None, shape: Any) -> pa.DataType | None:
    """The Arrow type of a column that was trained on."""
    if dtype is None or shape is None:
        return None
    if dtype in ("str", "bytes"):
        return pa.string() if dtype == "str" else pa.binary()
    kind = pa.from_numpy_dtype(np.dtype(dtype))
    for _ in shape:
        kind = pa.list_(kind)
    return kind
