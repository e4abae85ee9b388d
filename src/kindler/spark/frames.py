"""Spark DataFrames as a source: the types of their columns, and how their rows leave the JVM.

Works on classic and Spark Connect frames alike; no RDD, no JVM gateway. Whether the rows have to go through
Spark at all is decided in `direct_scan.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import ArrayType, StructField, TimestampType, UserDefinedType

from kindler.data.columns import Columns
from kindler.errors import ConfigError
from kindler.spark.frame_errors import frame_error

__all__ = [
    "FEED",
    "ROW",
    "UNNUMBERED",
    "Feed",
    "Where",
    "arrow_types",
    "collected",
    "column",
    "feed_frame",
    "own_columns",
    "packed_frame",
    "refuse_ambiguous",
    "type_in_arrow",
]

ROW = "_kindler_row"  # where a row stood in the frame, so that its order survives the shuffle
UNNUMBERED = -1  # what ROW holds in a stream, whose rows Spark cannot number
_PARTITION_SHIFT = 33  # monotonically_increasing_id: the partition above, the row in it below
_PACKED_BYTES = 64 << 20
FEED = "_kindler_feed"  # which of several frames a row belongs to


@dataclass(frozen=True, kw_only=True)
class Feed:
    """A frame whose rows go to the workers through Spark, under a name they find it by.

    Attributes:
        name: That name.
        frame: The rows.
        columns: What is read of each.
        keeper: Whoever must live as long as the frame is needed.
    """

    name: str
    frame: DataFrame
    columns: Columns
    keeper: Any = None


class Where:
    """Names a row by where it stood in the frame, out of what `ROW` holds."""

    def __init__(self, ids: np.ndarray[Any, Any]) -> None:
        self._ids = ids

    def __call__(self, index: int) -> str:
        row_id = int(self._ids[index])
        if row_id == UNNUMBERED:
            return f"{index} of its batch"
        return f"{row_id & ((1 << _PARTITION_SHIFT) - 1)} of partition {row_id >> _PARTITION_SHIFT}"


def arrow_types(frame: DataFrame) -> dict[str, pa.DataType | None]:
    """Each column's type as Arrow has it; None where Arrow has none for it."""
    return {field.name: _arrow_type(field.dataType) for field in frame.schema.fields}


def type_in_arrow(field: StructField) -> pa.DataType:
    """A column's type as Arrow has it.

    Raises:
        ConfigError: Arrow has none for it.
    """
    found = _arrow_type(field.dataType)
    if found is None:
        raise ConfigError(
            f"column {field.name!r} is of type {field.dataType.simpleString()}, which Arrow does not have."
        )
    return found


def packed_frame(spark: SparkSession, arrays: Mapping[str, np.ndarray[Any, Any]]) -> DataFrame:
    """Arrays as a frame: a row's numbers are one binary cell, which costs Spark far less than a list."""
    return spark.createDataFrame(pa.table({name: _packed(array) for name, array in arrays.items()}))


def column(name: str) -> Column:
    """The column of exactly this name, whatever signs are in it."""
    return F.col("`" + name.replace("`", "``") + "`")


def collected(frame: DataFrame, names: Sequence[str], *, rows: int | None = None) -> pa.Table:
    """Columns of a frame, or of its first rows, in this process.

    Raises:
        DataError: Spark cannot compute the frame.
    """
    chosen = frame.select(*map(column, names))
    try:
        table = (chosen if rows is None else chosen.limit(rows)).toArrow()
    except Exception as exc:  # noqa: BLE001 - what is not the frame's own fault is raised as it is
        raise frame_error(exc, [(frame, names)]) from None
    return table.rename_columns(list(names))


def refuse_ambiguous(frame: DataFrame, names: Sequence[str]) -> None:
    """Complain about names that several columns of the frame have; Spark mostly takes no notice of case."""
    times = Counter(name.lower() for name in frame.columns)
    for name in names:
        if times[name.lower()] == 1:
            continue
        alike = [one for one in frame.columns if one.lower() == name.lower()]
        if frame.sparkSession.conf.get("spark.sql.caseSensitive", "false") == "true":
            alike = [one for one in alike if one == name]
        if len(alike) > 1:
            raise ConfigError(
                f"column {name!r} could be any of {alike}, which the frame has.\n"
                "Hint: frame.toDF(...) gives every column a name of its own."
            )


def feed_frame(feeds: Sequence[Feed], workers: int) -> DataFrame:
    """One frame with the rows of all feeds, dealt evenly to `workers` partitions.

    It has the feeds' columns (see `own_columns`), `ROW` and `FEED`.
    """
    # Spark resolves the columns of `mapInArrow` by name, where a dot would mean a field: so none has a name.
    shared = _have_same_types(feeds)
    tagged = [
        feed.frame.select(
            *[
                column(name).alias(_place(i, None if shared else number))
                for i, name in enumerate(feed.columns.names)
            ],
            F.monotonically_increasing_id().alias(ROW),
            F.lit(number).alias(FEED),
        )
        for number, feed in enumerate(feeds)
    ]
    whole = tagged[0]
    for more in tagged[1:]:
        # Feeds of other types keep their own columns, which are null in the rows of the others: a common type
        # would change what the model gets, or there is none.
        whole = whole.unionByName(more, allowMissingColumns=not shared)
    return whole.repartition(workers)


def own_columns(batch: pa.RecordBatch, names: Sequence[str], number: int) -> pa.RecordBatch:
    """What a batch of `feed_frame` has of the columns of one feed, under their own names.

    Args:
        batch: Rows of this feed only.
        names: The feed's columns.
        number: Which feed it is.
    """
    shared = _place(0, None) in batch.schema.names
    places = [_place(i, None if shared else number) for i in range(len(names))]
    return pa.RecordBatch.from_arrays([batch.column(place) for place in places], names=list(names))


def _place(index: int, feed: int | None) -> str:
    return f"c{index}" if feed is None else f"f{feed}c{index}"


def _have_same_types(feeds: Sequence[Feed]) -> bool:
    """Whether the columns of all feeds have the same types, place by place; nulls in arrays do not count."""
    kinds = [
        [feed.frame.schema[name].dataType.simpleString() for name in feed.columns.names] for feed in feeds
    ]
    return all(kind == kinds[0] for kind in kinds)


def _arrow_type(kind: Any) -> pa.DataType | None:
    if isinstance(kind, TimestampType):
        return pa.timestamp("us", "UTC")
    if isinstance(kind, ArrayType):
        inside = _arrow_type(kind.elementType)
        return None if inside is None else pa.list_(inside)
    try:
        return to_arrow_type(kind.sqlType() if isinstance(kind, UserDefinedType) else kind)
    except PySparkTypeError:
        return None


def _packed(array: np.ndarray[Any, Any]) -> pa.ChunkedArray:
    rows = max(1, _PACKED_BYTES // max(1, array[:1].nbytes))
    return pa.chunked_array(
        [
            pa.array([row.tobytes() for row in array[start : start + rows]], pa.binary())
            for start in range(0, len(array), rows)
        ],
        pa.binary(),
    )
