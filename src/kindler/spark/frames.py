"""Spark DataFrames as a source: what their plan says, and how their rows leave the JVM.

Works on classic and Spark Connect frames alike; no RDD, and the JVM gateway only to look at a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import ArrayType, TimestampType, UserDefinedType

from kindler.data import parquet
from kindler.data.columns import Columns
from kindler.data.dealing import BASE, Dealing
from kindler.data.sources import ROW_BITS
from kindler.errors import ConfigError, KindlerError
from kindler.spark.session import is_connect

__all__ = [
    "FEED",
    "LANE",
    "ROW",
    "UNNUMBERED",
    "Feed",
    "Where",
    "arrow_types",
    "feed_frame",
    "packed_frame",
    "partition_keys",
    "plain_parquet",
]

LANE = "_kindler_lane"  # which of the lanes it was dealt to
ROW = "_kindler_row"  # where a row stood in the frame, so that its order survives the shuffle
UNNUMBERED = -1  # what ROW holds in a stream, whose rows Spark cannot number
_LOW_ORDERS, _HIGH_ORDERS = 32, 32  # of which each stretch of rows takes one
_WORD = 0xFFFFFFFF
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
        return f"{row_id & ((1 << ROW_BITS) - 1)} of partition {row_id >> ROW_BITS}"


def arrow_types(frame: DataFrame) -> dict[str, pa.DataType | None]:
    """Each column's type as Arrow has it; None where Arrow has none for it."""
    return {field.name: _arrow_type(field.dataType) for field in frame.schema.fields}


def packed_frame(spark: SparkSession, arrays: Mapping[str, np.ndarray[Any, Any]]) -> DataFrame:
    """Arrays as a frame: a row's numbers are one binary cell, which costs Spark far less than a list."""
    return spark.createDataFrame(pa.table({name: _packed(array) for name, array in arrays.items()}))


def plain_parquet(
    frame: DataFrame, names: Sequence[str], *, must: bool = False
) -> parquet.ParquetFiles | None:
    """The files behind a frame that is provably nothing but a scan of them, or None.

    Args:
        frame: Any DataFrame.
        names: The columns that are wanted from it.
        must: Raise ConfigError with the reason instead of returning None.
    """
    try:
        return _inspect(frame, names)
    except _NotPlain as reason:
        if must:
            raise ConfigError(
                "ingest='direct' needs a frame that is a plain Parquet scan with at most a choice of columns;"
                f" {reason}.\nHint: ingest='auto' or 'inline' takes any frame."
            ) from None
        return None


def feed_frame(feeds: Sequence[Feed], workers: int, dealing: Dealing) -> DataFrame:
    """One frame with the rows of all feeds, dealt to `workers` partitions: partition r has worker r's rows.

    Its columns are the feeds' in their order, then `ROW`, `LANE` and `FEED`.
    """
    # Spark resolves the columns of `mapInArrow` by name, where a dot would mean a field: so none has a name.
    tagged = [
        feed.frame.select(
            *[F.col(f"`{name}`").alias(f"c{i}") for i, name in enumerate(feed.columns.names)],
            F.monotonically_increasing_id().alias(ROW),
            F.lit(number).alias(FEED),
        ).select(*[f"c{i}" for i in range(len(feed.columns.names))], ROW, _lane(dealing).alias(LANE), FEED)
        for number, feed in enumerate(feeds)
    ]
    whole = tagged[0]
    for more in tagged[1:]:
        whole = whole.union(more)
    keys = _constants(partition_keys(workers))
    return whole.repartition(workers, F.element_at(keys, F.col(LANE) % workers + 1))


def _lane(dealing: Dealing) -> Column:
    """The lane of a row, from where it stands.

    As where rows are dealt without Spark: twelve neighbours differ modulo twelve, and as many as there are
    lanes have one each. Each stretch takes one of a few random orders, which travel with the plan.
    """
    groups = dealing.lanes // BASE
    place = F.col(ROW).bitwiseAND(F.lit((1 << ROW_BITS) - 1))
    low = _drawn(dealing, _LOW_ORDERS, BASE, place % BASE, _whole(place, BASE))
    high = _drawn(
        dealing, _HIGH_ORDERS, groups, _whole(place, BASE) % groups, _whole(place, dealing.lanes), low
    )
    return ((high * BASE + low) % dealing.known_lanes).cast("int")


def _drawn(dealing: Dealing, orders: int, width: int, place: Column, *stretch: Column) -> Column:
    """The number at a place of one of the random orders, shifted; which and how far, the stretch decides."""
    hashed = F.xxhash64(F.shiftright(F.col(ROW), ROW_BITS), *stretch, F.lit(dealing.seed))
    choice = F.pmod(hashed, F.lit(orders * width))
    shift = choice % width
    numbers = _constants(dealing.drawn(orders, width))
    return (F.element_at(numbers, (choice - shift + place + 1).cast("int")) + shift) % width


def _whole(number: Column, divisor: int) -> Column:
    return F.floor(number / divisor)


def _constants(numbers: Sequence[int]) -> Column:
    """Numbers as one constant of the plan; each on its own would be a call to the JVM."""
    return F.split(F.lit(",".join(map(str, numbers))), ",").cast("array<int>")


def partition_keys(partitions: int) -> list[int]:
    """For each partition an integer that Spark's hash partitioning sends there.

    >>> partition_keys(3)
    [2, 0, 1]
    """
    found: dict[int, int] = {}
    key = 0
    while len(found) < partitions:
        found.setdefault(_murmur3(key) % partitions, key)
        key += 1
    return [found[partition] for partition in range(partitions)]


def _murmur3(number: int) -> int:
    """Spark's hash of an integer: Murmur3 of its four bytes with the seed 42, as a signed number."""
    mixed = number * 0xCC9E2D51 & _WORD
    mixed = _rotated(mixed, 15) * 0x1B873593 & _WORD
    state = (_rotated(42 ^ mixed, 13) * 5 + 0xE6546B64) & _WORD
    state ^= 4
    state = (state ^ state >> 16) * 0x85EBCA6B & _WORD
    state = (state ^ state >> 13) * 0xC2B2AE35 & _WORD
    state ^= state >> 16
    return state - (1 << 32) if state >> 31 else state


def _rotated(word: int, bits: int) -> int:
    return (word << bits | word >> (32 - bits)) & _WORD


class _NotPlain(Exception):
    """Why a frame is not a plain scan."""


def _inspect(frame: DataFrame, names: Sequence[str]) -> parquet.ParquetFiles:
    spark = frame.sparkSession
    if frame.isStreaming:
        raise _NotPlain("it is a stream")
    if is_connect(spark):
        _check_connect_plan(frame, spark)
    else:
        _check_classic_plan(frame)
    try:
        files = parquet.inspect(frame.inputFiles())
        schema = parquet.schema(files)
    except (OSError, KindlerError) as exc:
        raise _NotPlain(f"its files cannot be read from here ({exc})") from None
    types = arrow_types(frame)
    for name in names:
        if name not in schema.names:
            raise _NotPlain(f"column {name!r} is not stored in its files")
        _check_type(name, types[name], schema.field(name).type)
    return files


def _check_classic_plan(frame: Any) -> None:
    plan = frame._jdf.queryExecution().optimizedPlan()
    while _class(plan) == "Project":
        expressions = plan.projectList()
        kinds = {_class(expressions.apply(i)) for i in range(expressions.size())}
        if kinds != {"AttributeReference"}:
            raise _NotPlain("it computes columns")
        plan = plan.children().head()
    if _class(plan) != "LogicalRelation" or _class(plan.relation()) != "HadoopFsRelation":
        raise _NotPlain(f"its plan has a step of kind {_class(plan)}")
    if _class(plan.relation().fileFormat()) != "ParquetFileFormat":
        raise _NotPlain(f"its files are read as {_class(plan.relation().fileFormat())}")


def _class(java_object: Any) -> str:
    return str(java_object.getClass().getSimpleName())


def _check_connect_plan(frame: Any, spark: Any) -> None:
    relation = frame._plan.to_proto(spark.client).root
    while (kind := relation.WhichOneof("rel_type")) == "project":
        if any(e.WhichOneof("expr_type") != "unresolved_attribute" for e in relation.project.expressions):
            raise _NotPlain("it computes columns")
        relation = relation.project.input
    if kind != "read" or relation.read.is_streaming or relation.read.WhichOneof("read_type") != "data_source":
        raise _NotPlain(f"its plan has a step of kind {kind}")
    if relation.read.data_source.format.lower() != "parquet" or relation.read.data_source.predicates:
        raise _NotPlain(f"its files are read as {relation.read.data_source.format}")


def _check_type(name: str, wanted: pa.DataType | None, stored: pa.DataType) -> None:
    """A frame may be read under another type than its files have; then Spark must do the reading."""
    if wanted is None or _leaf(wanted) != _leaf(stored):
        raise _NotPlain(f"column {name!r} is {wanted} in the frame and {stored} in its files")


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


def _leaf(kind: Any) -> tuple[int, str]:
    """How deep the lists go and what is in them, without the names and nullability on the way."""
    depth = 0
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        depth, kind = depth + 1, kind.value_type
    for family in ("timestamp", "decimal", "struct", "string", "binary"):
        if getattr(pa.types, f"is_{family}")(kind):
            return depth, family
    return depth, str(kind)
