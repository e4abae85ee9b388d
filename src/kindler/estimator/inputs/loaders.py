"""Batches that user code makes on the workers: data loaders, and functions that return one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from kindler.data.column_options import ColumnOptions
from kindler.estimator.inputs.contract import Input, Prepared, ScoreRequest, SourceRequest
from kindler.train.loader_source import is_stream, stream_source
from kindler.train.options import PredictOptions

_COMPLAINT = (
    "predict does not take functions or data loaders; pass a Spark DataFrame, an XShards, a Parquet path with"
    " output_path, arrays, a pandas DataFrame or a pyarrow Table."
)


class LoaderInput(Input):
    """A torch `DataLoader`, a `tf.data.Dataset`, a Keras `PyDataset`, or a function that makes batches."""

    has_columns = False

    @staticmethod
    def accepts(data: Any) -> bool:
        return is_stream(data)

    def source(self, request: SourceRequest) -> Prepared:
        source = stream_source(
            self.data,
            config=request.config,
            weights=request.row_weights,
            allow_nan=request.columns.allow_nan or False,
        )
        return source, None

    def sample(self, options: ColumnOptions, layout: Mapping[str, Any]) -> NoReturn:
        raise TypeError(_COMPLAINT)

    def score_complaints(self, options: PredictOptions) -> list[str]:
        return [_COMPLAINT]

    def score(self, request: ScoreRequest) -> NoReturn:
        raise TypeError(_COMPLAINT)
