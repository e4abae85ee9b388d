"""What the user handed to an Estimator, made into sources: which engine, which way in, which columns.

Everything that can be complained about is complained about here, on the driver, before a worker starts.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kindler.data import parquet
from kindler.data.columns import Columns
from kindler.data.plan import ColumnOptions
from kindler.data.sources import (
    DeliveredSource,
    ParquetSource,
    Source,
    arrow_source,
    is_local_data,
    kind,
    parquet_source,
)
from kindler.data.spool import Spool
from kindler.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from kindler.spark.frames import Feed

__all__ = ["Ingest", "choose_engine", "is_frame", "is_path", "prepare", "session_for"]

Ingest = Literal["auto", "inline", "direct"]


def is_frame(data: Any) -> bool:
    """Whether this is a Spark DataFrame, classic or Connect; pyspark is not imported to find out."""
    return type(data).__name__ == "DataFrame" and type(data).__module__.startswith("pyspark.sql")


def is_path(data: Any) -> bool:
    """Whether this names Parquet files."""
    if isinstance(data, list):
        return bool(data) and all(isinstance(item, str | os.PathLike) for item in data)
    return isinstance(data, str | os.PathLike)


def choose_engine(engine: str, data: Any, validation: Any = None) -> Literal["local", "spark"]:
    """Spark when the data is Spark's, else local; or as asked."""
    given = [data] if validation is None else [data, validation]
    for item in given:
        if not (is_frame(item) or is_path(item) or is_local_data(item)):
            raise ConfigError(
                f"data is {kind(item)}.\nHint: pass a Spark DataFrame, a Parquet path or list of paths,"
                " a dict or tuple of numpy arrays, a pandas DataFrame or a pyarrow Table."
            )
    if engine == "auto":
        return "spark" if any(is_frame(item) for item in given) else "local"
    return "spark" if engine == "spark" else "local"


def session_for(*data: Any) -> SparkSession:
    """The session of the first frame, or the active one, or a new one."""
    from kindler.spark.session import init

    frames: list[DataFrame] = [item for item in data if is_frame(item)]
    return frames[0].sparkSession if frames else init()


def prepare(
    data: Any,
    *,
    name: str,
    options: ColumnOptions,
    spark: SparkSession | None,
    ingest: Ingest,
    scratch: Path,
) -> tuple[Source, Feed | None]:
    """A source for the workers, and what Spark must bring to them where it is to do the reading.

    Args:
        data: What the user handed in.
        name: What the workers find it by.
        options: Which columns.
        spark: The session the workers run in; None for the local engine.
        ingest: The way in for a Spark DataFrame.
        scratch: Where the driver may write.
    """
    if is_frame(data):
        return _from_frame(data, name, options, spark, ingest, scratch)
    if is_path(data):
        return _not_empty(parquet_source(parquet.inspect(data), options)), None
    local = arrow_source(data, options, scratch=scratch)
    if spark is None or _shares_files(spark):
        return local, None
    return _shipped(local.folder, local.columns, name, spark)


def _from_frame(
    frame: DataFrame,
    name: str,
    options: ColumnOptions,
    spark: SparkSession | None,
    ingest: Ingest,
    scratch: Path,
) -> tuple[Source, Feed | None]:
    from kindler.spark.frames import Feed, arrow_types, plain_parquet

    columns = options.plan(arrow_types(frame))
    if ingest != "inline":
        files = plain_parquet(frame, columns.names, must=ingest == "direct")
        if files is not None:
            return _not_empty(ParquetSource(files, columns)), None
    if spark is None:
        table = frame.select(*[f"`{column}`" for column in columns.names]).toArrow()
        return arrow_source(table, options, scratch=scratch), None
    return DeliveredSource(columns, name), Feed(name=name, frame=frame, columns=columns)


def _not_empty(source: ParquetSource) -> ParquetSource:
    if not source.files.rows:
        raise DataError("the data has no rows.")
    return source


def _shares_files(spark: Any) -> bool:
    """Whether the workers run on this very machine."""
    return (spark.conf.get("spark.master", None) or "").startswith("local")


def _shipped(folder: str, columns: Columns, name: str, spark: SparkSession) -> tuple[Source, Feed]:
    """Data of the driver's for workers elsewhere: it travels as a frame of packed rows."""
    from kindler.spark.frames import Feed, packed_frame

    spool = Spool.open(folder)
    as_packed = {
        column.name: replace(
            column, dtype=spool.arrays[column.name].dtype.name, shape=spool.arrays[column.name].shape[1:]
        )
        for column in columns.all
    }
    packed = replace(
        columns,
        features=tuple(as_packed[c.name] for c in columns.features),
        labels=tuple(replace(as_packed[c.name], role="label") for c in columns.labels),
    )
    frame = packed_frame(spark, {c.name: spool.arrays[c.name] for c in packed.all})
    return DeliveredSource(packed, name), Feed(name=name, frame=frame, columns=packed)
