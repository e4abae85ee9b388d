"""What the user handed to an Estimator, made into sources: which engine, which way in, which columns.

Everything that can be complained about is complained about here, on the driver, before a worker starts.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kindler.data import datasets, parquet
from kindler.data.column_options import ColumnOptions, Names
from kindler.data.columns import Columns
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
from kindler.train.loader_source import is_stream
from kindler.xshards import XShards, as_input

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from kindler.spark.frames import Feed

__all__ = ["Ingest", "choose_engine", "fitting", "is_frame", "is_path", "opener", "prepare", "session_for"]

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
        datasets.refuse_unusable(item)
        known = is_frame(item) or is_path(item) or is_local_data(item) or isinstance(item, XShards)
        if not (known or is_stream(item)):
            raise ConfigError(
                f"data is {kind(item)}.\nHint: pass a Spark DataFrame, an XShards, a Parquet path or list of"
                " paths, a dict or tuple of numpy arrays, a pandas DataFrame or a pyarrow Table; or a torch"
                " DataLoader, a tf.data.Dataset, or a function of (config, batch_size) that makes one."
            )
    if engine == "auto":
        return "spark" if any(_is_on_spark(item) for item in given) else "local"
    return "spark" if engine == "spark" else "local"


def session_for(*data: Any) -> SparkSession:
    """The session of the first data of Spark's, or the active one, or a new one."""
    from kindler.spark.session import init

    for item in data:
        found = as_input.session(item) if isinstance(item, XShards) else None
        if found is not None or is_frame(item):
            return found or item.sparkSession
    return init()


def fitting(known: ColumnOptions, data: Any) -> ColumnOptions:
    """What the last `fit` was told of columns, less what shards say themselves and have no columns for.

    A model that was fitted on columns of other names still takes the `x` of shards that have one.
    """
    found = as_input.offer(data) if isinstance(data, XShards) else None
    if found is None or found.features is None:
        return known
    there, nan = set(found.types), known.allow_nan
    return replace(
        known,
        feature_cols=known.feature_cols if set(_listed(known.feature_cols)) <= there else None,
        label_cols=known.label_cols if set(_listed(known.label_cols)) <= there else None,
        shapes={name: given for name, given in (known.shapes or {}).items() if name in there},
        dtypes={name: given for name, given in (known.dtypes or {}).items() if name in there},
        allow_nan=nan if isinstance(nan, bool) else [name for name in _listed(nan) if name in there],
    )


def _listed(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


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
    if isinstance(data, XShards):
        here = spark is None or _shares_files(spark)
        return as_input.prepare(data, name=name, options=options, spark=spark, here=here)
    if is_frame(data):
        return _from_frame(data, name, options, spark, ingest, scratch)
    if is_path(data):
        return _not_empty(parquet_source(parquet.inspect(data, opener(spark)), options)), None
    local = arrow_source(data, options, scratch=scratch)
    if spark is None or _shares_files(spark):
        return local, None
    return _shipped(local.folder, local.columns, name, spark)


def opener(spark: SparkSession | None) -> parquet.EachFile | None:
    """Who opens the files of paths: tasks of Spark, where the workers are Spark's; else None."""
    if spark is None:
        return None
    from kindler.spark.files import each_file

    return partial(each_file, spark)


def _is_on_spark(data: Any) -> bool:
    return is_frame(data) or (isinstance(data, XShards) and data.home == "spark")


def _from_frame(
    frame: DataFrame,
    name: str,
    options: ColumnOptions,
    spark: SparkSession | None,
    ingest: Ingest,
    scratch: Path,
) -> tuple[Source, Feed | None]:
    from kindler.spark.direct_scan import plain_parquet
    from kindler.spark.frames import Feed, arrow_types, collected, refuse_ambiguous

    columns = options.plan(arrow_types(frame))
    refuse_ambiguous(frame, columns.names)
    if ingest != "inline":
        scan = plain_parquet(frame, columns.names, must=ingest == "direct")
        if scan is not None:
            return _not_empty(ParquetSource(scan.files, columns)), None
    if spark is None:
        return arrow_source(collected(frame, columns.names), options, scratch=scratch), None
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
