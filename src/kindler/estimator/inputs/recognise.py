"""The table of the kinds of data, and what follows from it: the engine and the Spark session of a run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

from kindler.data.arrays import kind, refuse_unusable
from kindler.data.tables import Table, UnreadableError
from kindler.errors import ConfigError, MissingExtraError
from kindler.estimator.inputs.contract import Input
from kindler.estimator.inputs.local import ArrowInput, DatasetInput, LoaderInput, MemoryInput, ParquetInput
from kindler.estimator.inputs.shards import ShardsInput
from kindler.estimator.inputs.spark import FrameInput, TableInput
from kindler.train.options import Engine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The first one that accepts the data takes it.
KINDS: tuple[type[Input], ...] = (
    FrameInput,
    ShardsInput,
    ParquetInput,
    LoaderInput,
    DatasetInput,
    MemoryInput,
    ArrowInput,
)


def recognise(data: Any) -> Input:
    """The user's data as an input of its kind; raises ConfigError if it has none."""
    refuse_unusable(data)
    for kind_of_input in KINDS:
        if kind_of_input.accepts(data):
            return _readable(kind_of_input(data))
    raise ConfigError(
        f"data is {kind(data)}.\nHint: pass a Spark DataFrame, an XShards, a Parquet path or list of paths, a"
        " kindler.Table, a dict or tuple of numpy arrays, a pandas DataFrame, a pyarrow Table"
        " or another object with __arrow_c_stream__; or a torch"
        " DataLoader, a tf.data.Dataset, or a function of (config, batch_size) that returns one."
    )


def _readable(found: Input) -> Input:
    """A table that cannot be read without Spark goes through Spark's own reader, if a session runs."""
    table = found.places[0] if isinstance(found, ParquetInput) and len(found.places) == 1 else None
    if not isinstance(table, Table):
        return found
    try:
        table.files()
    except (UnreadableError, MissingExtraError) as exc:
        spark = running_session()
        if spark is None:
            raise
        try:
            return TableInput(table, spark)
        except ConfigError as also:
            problem, _, hint = str(exc).partition("\nHint: ")
            raise ConfigError(f"{problem}\n{also}\nHint: {hint}") from exc
    return found


def choose_engine(asked: Engine, *data: Input) -> Literal["local", "spark"]:
    if asked != "auto":
        return asked
    return "spark" if any(item.engine == "spark" for item in data) else "local"


def running_session() -> SparkSession | None:
    if "pyspark" not in sys.modules:
        return None
    from kindler.spark.session import running

    return running()


def session_for(*data: Input) -> SparkSession:
    from kindler.spark.session import init

    sessions = (item.session() for item in data)
    return next((session for session in sessions if session is not None), None) or init()
