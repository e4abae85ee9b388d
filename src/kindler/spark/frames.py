"""Spark DataFrames as a source: the types of their columns, and how their rows leave the JVM.

Works on classic and Spark Connect frames alike; no RDD, no JVM gateway. Whether the rows have to go through
Spark at all is decided in `direct_scan.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import ArrayType, TimestampType, UserDefinedType

from kindler.data.columns import Columns

__all__ = [
    "FEED",
    "ROW",
    "UNNUMBERED",
    "Feed",
    "Where",
    "arrow_types",
    "feed_frame",
    "packed_frame",
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


def packed_frame(spark: SparkSession, arrays: Mapping[str, np.ndarray[Any, Any]]) -> DataFrame:
    """Arrays as a frame: a row's numbers are one binary cell, which costs Spark far less than a list."""
    return spark.createDataFrame(pa.table({name: _packed(array) for name, array in arrays.items()}))


def feed_frame(feeds: Sequence[Feed], workers: int) -> DataFrame:
    """One frame with the rows of all feeds, dealt evenly to `workers` partitions.

    Its columns are the feeds' in their order, then `ROW` and `FEED`.
    """
    # Spark resolves the columns of `mapInArrow` by name, where a dot would mean a field: so none has a name.
    tagged = [
        feed.frame.select(
            *[F.col(f"`{name}`").alias(f"c{i}") for i, name in enumerate(feed.columns.names)],
            F.monotonically_increasing_id().alias(ROW),
            F.lit(number).alias(FEED),
        )
        for number, feed in enumerate(feeds)
    ]
    whole = tagged[0]
    for more in tagged[1:]:
        whole = whole.union(more)
    return whole.repartition(workers)


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
