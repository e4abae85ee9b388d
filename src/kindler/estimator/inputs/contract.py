"""What the estimator needs of a kind of data, and what it tells that kind about the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from kindler.data.column_options import ColumnOptions
from kindler.data.columns import Array, Columns
from kindler.data.preparation import Preparation
from kindler.data.sources import Source
from kindler.engine.job import Job
from kindler.frameworks.state_format import ScoringModel
from kindler.inference.host_model import sharing
from kindler.inference.predictor import Predictor, Recipe
from kindler.train.loaders import StreamSource
from kindler.train.options import Ingest, PredictOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kindler.spark.frames import Feed

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
        labels: The columns that were its labels.
    """

    framework: str
    model: ScoringModel
    options: PredictOptions
    layout: Mapping[str, Any]
    device: str
    seed: int
    job: Job
    labels: tuple[str, ...] = ()

    def predictor(self, columns: Columns, *, threads: int | None = None) -> Predictor:
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
            columns=Columns(features=columns.features, labels=(), stack_features=columns.stack_features),
            batch_size=self.options.batch_size,
            output_cols=self.options.output_cols,
            finish=self.options.finish,
            preparation=self.preparation(columns),
            labels=self.labels,
            stack=bool(self.options.columns.stack_features),
            sharing=sharing(),
        )

    def preparation(self, columns: Columns) -> Preparation | None:
        asked = self.options.preparation
        needed = asked is not None and (asked.active or any(column.ragged for column in columns.features))
        return asked if needed else None


class Input(ABC):
    """Data of one kind, as the user passed it.

    Attributes:
        data: The data itself.
        engine: Where its workers run unless the user decides.
        has_columns: Whether columns can be chosen; user code that makes batches has none.
    """

    engine: Literal["local", "spark"] = "local"
    has_columns: ClassVar[bool] = True

    def __init__(self, data: Any) -> None:
        self.data = data

    @staticmethod
    @abstractmethod
    def accepts(data: Any) -> bool:
        """Whether `data` is of this kind. Imports nothing to find out."""

    def session(self) -> SparkSession | None:
        """The Spark session that the data lives in, if any."""
        return None

    def complete(self, columns: ColumnOptions, known: ColumnOptions) -> ColumnOptions:
        """Complete the requested columns with those of the last `fit`."""
        return columns.or_else(known)

    @abstractmethod
    def source(self, request: SourceRequest) -> Prepared:
        """Rows for the workers of a run, and what Spark must send to them if it does the reading.

        Raises:
            ConfigError: The options do not fit the data.
            DataError: The data cannot feed a model.
        """

    @abstractmethod
    def sample(self, options: ColumnOptions, layout: Mapping[str, Any]) -> tuple[Columns, list[Array]]:
        """The columns that `score` reads, and a few rows of the features: real ones, or zeros.

        `layout` has dtype and row shape of the columns that the model was trained on.
        """

    def score_complaints(self, options: PredictOptions) -> list[str]:
        """Why `predict` cannot take this data with these options."""
        if options.output_path is None:
            return []
        return ["output_path needs a Parquet path as data; write a scored DataFrame with its own write."]

    @abstractmethod
    def score(self, request: ScoreRequest) -> Any:
        """The data with the model's outputs, in the same kind."""
