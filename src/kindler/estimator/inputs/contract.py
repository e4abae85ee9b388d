"""What the estimator needs of a kind of data, what it tells that kind about the run, and sample rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from kindler.config import Ingest
from kindler.data.arrays import kind, values
from kindler.data.batches import inputs
from kindler.data.column_options import ColumnOptions
from kindler.data.columns import Array, ColumnPlan, conform, to_numpy
from kindler.data.preparation import Prepare
from kindler.data.ragged import read_column
from kindler.data.rejoin import Chunk, chunk_of
from kindler.data.sources import Source
from kindler.data.statistics import Summary
from kindler.engine.hub import Event
from kindler.engine.job import Job
from kindler.errors import ConfigError, DataError
from kindler.frameworks.caller_state import untouched
from kindler.frameworks.state_format import ScoringModel
from kindler.inference.host_model import sharing
from kindler.inference.predictor import Predictor, Recipe
from kindler.inference.row_errors import Failures
from kindler.train.loaders import StreamSource
from kindler.train.options import PredictOptions
from kindler.train.progress import ProgressBar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kindler.spark.frames import Feed

SAMPLE_ROWS = 100  # to find one that can be scored
PROBE_ROWS = 2  # a model that squeezes its output would lose the rows of a single one

Prepared: TypeAlias = "tuple[Source | StreamSource, Feed | None]"


@dataclass(frozen=True, kw_only=True)
class SourceRequest:
    """The run that rows are needed for.

    Attributes:
        name: The name by which workers find the rows.
        columns: Which columns to read.
        ingest: How the rows of a Spark DataFrame reach the workers.
        spark: The session that the workers run in; None on the local engine.
        scratch: A folder that the driver may write to until the run has ended.
        config: The argument of user functions that make data.
        row_weights: Whether the third part of a batch that user code makes is a weight per row.
    """

    name: str
    columns: ColumnOptions
    ingest: Ingest = "auto"
    spark: SparkSession | None = None
    scratch: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    row_weights: bool = False

    @property
    def shares_files(self) -> bool:
        """Whether the workers run on this machine and see its files."""
        return self.spark is None or (self.spark.conf.get("spark.master", None) or "").startswith("local")


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """The model to score with, and how.

    Attributes:
        layout: dtype and row shape of the columns it was trained on.
        seed: Decides the initial weights of a model that was never trained.
        job: The workers to start on this machine, if they are needed.
        warn: Warns the caller of rows that failed.
        described: Records the model and the options as JSON, the same for the same in another process.
        labels: The columns that were its labels.
    """

    framework: str
    model: ScoringModel
    options: PredictOptions
    layout: Mapping[str, Any]
    device: str
    seed: int
    job: Job
    described: Callable[[], Mapping[str, Any]] = dict
    warn: Callable[[str], None] = warnings.warn
    labels: tuple[str, ...] = ()

    def predictor(self, columns: ColumnPlan, *, threads: int | None = None) -> Predictor:
        recipe = Recipe(
            framework=self.framework,
            spec=self.model.spec,
            state=self.model.state,
            content=self.model.content,
            feature_names=tuple(column.name for column in columns.features),
            device=self.device,
            seed=self.seed,
            threads=threads,
            precision=self.options.precision,
        )
        return Predictor(
            recipe=recipe,
            columns=ColumnPlan(features=columns.features, labels=(), stack_features=columns.stack_features),
            batch_size=self.options.batch_size,
            output_cols=self.options.output_cols,
            finish=self.options.finish,
            types=self.options.types,
            preparation=self.preparation(columns),
            labels=self.labels,
            stack=bool(self.options.columns.stack_features),
            sharing=sharing(),
            lenient=self.options.on_error != "raise",
            max_errors=self.options.max_errors,
            error_col=self.options.on_error == "column",
        )

    def knowing(
        self, predictor: Predictor, types: Mapping[str, Any], first: Callable[[], Mapping[str, Any]]
    ) -> Predictor:
        """With the lengths of its columns and the types of its outputs, where rows may fail: one that differs
        is then known to have failed. `first` reads a few rows, in case they must be looked at."""
        first = cache(first)
        columns = self.with_lengths(predictor.columns, types, first)
        if predictor.types is not None and predictor.output_cols is not None:
            return replace(predictor, columns=columns, like=(np.empty(0, object),) * len(predictor.types))
        sample = None if predictor.preparation is not None else zeros(columns, self.layout, types)
        with untouched():
            if sample is not None:
                return replace(predictor, columns=columns).tried(inputs(columns, sample))
            return replace(predictor, columns=columns).tried(_readable(columns, first()))

    def with_lengths(
        self, columns: ColumnPlan, types: Mapping[str, Any], first: Callable[[], Mapping[str, Any]]
    ) -> ColumnPlan:
        sample = zeros(columns, self.layout, types)
        if sample is None:
            sample = list(_readable(replace(columns, stack_features=False), first()))
        shapes = {c.name: a.shape[1:] for c, a in zip(columns.features, sample, strict=True) if not c.ragged}
        return columns.changed(
            lambda c: replace(c, shape=shapes[c.name]) if len(shapes.get(c.name, ())) else c
        )

    def preparation(self, columns: ColumnPlan) -> Prepare | None:
        asked = self.options.preparation
        needed = asked is not None and (asked.active or any(column.ragged for column in columns.features))
        return asked if needed else None


class Input:
    """Data of one kind, as the user passed it.

    Attributes:
        data: The data itself.
        engine: Where its workers run unless the user decides.
        name: What a record of the run calls this kind of data.
        held_out: The share of the rows that `split` left to validate with, if it did.
        has_columns: Whether columns can be chosen; user code that makes batches has none.
    """

    engine: Literal["local", "spark"] = "local"
    name: ClassVar[str] = "memory"
    held_out: float | None = None
    has_columns: ClassVar[bool] = True

    def __init__(self, data: Any) -> None:
        self.data = data

    @staticmethod
    def accepts(data: Any) -> bool:
        """Whether `data` is of this kind. Imports nothing to find out."""
        raise NotImplementedError

    def session(self) -> SparkSession | None:
        """The Spark session that the data lives in, if any."""
        return None

    def describe(self) -> dict[str, Any]:
        """What a record of the run keeps of the data, besides the files that workers read themselves."""
        return {"type": f"{type(self.data).__module__}.{type(self.data).__qualname__}"}

    def complete(self, columns: ColumnOptions, known: ColumnOptions) -> ColumnOptions:
        """Complete the requested columns with those of the last `fit`."""
        return columns.or_else(known)

    def split(self, share: float, seed: int) -> tuple[Input, Input]:
        """The rows to train on, and this share of them to validate with."""
        raise ConfigError(
            f"validation_split needs rows that can be split; received {kind(self.data)}.\n"
            "Hint: pass validation_data=..., or a Spark DataFrame, a Parquet path, arrays or a table."
        )

    def source(self, request: SourceRequest) -> Prepared:
        """Rows for the workers of a run, and what Spark must send to them if it does the reading.

        Raises:
            ConfigError: The options do not fit the data.
            DataError: The data cannot feed a model.
        """
        raise NotImplementedError

    def sample(self, options: ColumnOptions, layout: Mapping[str, Any]) -> tuple[ColumnPlan, list[Array]]:
        """The columns that `score` reads, and a few rows of the features: real ones, or zeros.

        `layout` has dtype and row shape of the columns that the model was trained on.
        """
        raise NotImplementedError

    def summaries(self, known: Collection[str], columns: ColumnOptions) -> dict[str, Summary]:
        """Summaries of the columns that have measures of these names; `columns` are those of the last fit."""
        raise ConfigError(
            f"drift needs rows with columns; received {kind(self.data)}.\n"
            "Hint: pass a Spark DataFrame, a Parquet path, arrays or a table."
        )

    def score_complaints(self, options: PredictOptions) -> list[str]:
        """Why `predict` cannot take this data with these options."""
        if options.output_path is None:
            return []
        return ["output_path needs a Parquet path as data; write a scored DataFrame with its own write."]

    def score(self, request: ScoreRequest) -> Any:
        """The data with the model's outputs, in the same kind."""
        raise NotImplementedError


def rows_to_train(rows: int, share: float) -> int:
    """As Keras counts them, so that both parts have a row."""
    kept = int(rows * (1.0 - share))
    if not 0 < kept < rows:
        raise ConfigError(
            f"validation_split={share}: of {rows:,} rows, {kept:,} would be left to train on and"
            f" {rows - kept:,} to validate with; both need at least one."
        )
    return kept


def zeros(columns: ColumnPlan, layout: Mapping[str, Any], types: Mapping[str, Any]) -> list[Array] | None:
    """A few rows of zeros; None if the width of a column shows only in a row."""
    arrays = []
    for column in columns.features:
        if column.ragged:
            return None
        known, kind = layout.get(column.name), types[column.name]
        scalar = kind is not None and not pa.types.is_nested(kind)
        if known is not None and column.shape is None and column.dtype is None:
            dtype, shape = known
        elif scalar and not pa.types.is_binary(kind):
            empty = to_numpy(pa.array([], kind), column, where=str)
            dtype, shape = empty.dtype, empty.shape[1:]
        elif column.shape is not None:
            dtype, shape = column.dtype or "float32", column.shape
        else:
            return None
        arrays.append(np.zeros((PROBE_ROWS, *shape), dtype))
    return arrays


def _readable(columns: ColumnPlan, rows: Mapping[str, Any]) -> Chunk:
    given = [rows[column.name] for column in columns.features]
    chunk = chunk_of(columns, len(given[0]), given, lambda i: i, lenient=True)
    if len(chunk.failed) == chunk.rows:
        if not chunk.rows:
            raise DataError("the data has no rows, so the width of its columns is unknown.")
        raise chunk.failed[0]
    return chunk


def repeated_row(row: pa.Table, columns: ColumnPlan) -> list[Array]:
    if not row.num_rows:
        raise DataError("the data has no rows, so the width of its columns is unknown.")
    arrays = [read_column(row.column(c.name), c, where=lambda i: i) for c in columns.features]
    return [array[np.zeros(PROBE_ROWS, np.int64)] for array in arrays]


def few_rows(given: Mapping[str, Any], columns: ColumnPlan) -> list[Array]:
    arrays = []
    for column in columns.features:
        first = values(given[column.name][:PROBE_ROWS], column.name)
        read = conform if isinstance(first, np.ndarray) else to_numpy
        array = np.array(read(first, column, where=lambda i: i))
        if not len(array):
            raise DataError("the data has no rows, so the width of its columns is unknown.")
        arrays.append(np.repeat(array[:1], PROBE_ROWS, axis=0) if len(array) < PROBE_ROWS else array)
    return arrays


class RowCounter:
    def __init__(self, progress: ProgressBar, rows: int) -> None:
        self._progress, self._rows = progress, rows
        self._done: dict[int, int] = {}

    def __call__(self, event: Event) -> None:
        if event.kind == "log":
            self._progress.log(event.rank, event.fields["line"])
        elif event.fields["name"] == "progress":
            self._done[event.rank] = event.fields["step"]
            done = sum(self._done.values())
            self._progress.report({"name": "progress", "epoch": 1, "step": done, "steps": self._rows})


class FailureCounter(RowCounter):
    """Ends the run when too many rows have failed, with those of `before`."""

    def __init__(self, progress: ProgressBar, rows: int, before: Failures, most: int | None) -> None:
        super().__init__(progress, rows)
        self._before, self._most = before, most
        self._failed: dict[int, Failures] = {}

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if event.kind != "log" and event.fields["name"] == "progress":
            self._failed[event.rank] = Failures(**event.fields["failures"])
            self.total().check(self._most)

    def total(self) -> Failures:
        return reduce(Failures.joined, self._failed.values(), self._before)
