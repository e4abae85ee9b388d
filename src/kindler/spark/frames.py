"""Spark DataFrames as a source: column types, how rows leave the JVM, and why they cannot. Needs neither
RDDs nor the JVM gateway, so it works with Connect too. Doubles leave as floats where the worker would
make floats of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException, PySparkTypeError
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import ArrayType, DoubleType, StructType, TimestampType, UserDefinedType

from kindler.data.columns import Column, ColumnPlan, unused_name
from kindler.data.ragged import Ragged
from kindler.data.row_order import BASE, RowAssignment
from kindler.data.sources import ROW_BITS, describe_row_id
from kindler.data.tables import Table
from kindler.errors import ConfigError, DataError
from kindler.spark.tasks import TASK_ERROR
from kindler.spark.versions import condition_of, from_arrow, to_arrow

LANE = "_kindler_lane"  # which of the lanes it was assigned to
ROW = "_kindler_row"  # where a row stood in the frame, so that its order survives the shuffle
FEED = "_kindler_feed"  # which of several frames a row belongs to
UNNUMBERED = -1  # what ROW holds in a stream, whose rows Spark cannot number
_LOW_ORDERS, _HIGH_ORDERS = 32, 32  # of which each stretch of rows takes one
_WORD = 0xFFFFFFFF
_MOST_OF_SHORT = 0x7FFF
_PACKED_BYTES = 64 << 20
_FLOAT_OVERFLOW = 2.0**128 - 2.0**103  # from here on a double rounds to an infinite float
_NO_FIT = "KINDLER_DOES_NOT_FIT"
_NO_FIT_PARTS = re.compile(rf"{_NO_FIT}\[(\d+),(\d+),([^,\]]*),(-?\d+)\]")

# What is where in the text of Spark's errors.
_FETCH_FAILED = re.compile(r"failed barrier \w+\. Most recent failure reason: \S*FetchFailed")
_CANCELLED = re.compile(r"\bJob \d+ cancelled")
_TRACEBACK = "Traceback (most recent call last):"
_END = re.compile(r"\n\s*(JVM stacktrace:|Driver stacktrace:|at [\w.$]+\(|SQLSTATE: )")
_CLASS = re.compile(r"^[\w.$]+(Exception|Error)\S*: ")
_BEGINNING = re.compile(r"thrown from the Python worker(?::|\. Please see the stack trace below\.)")
_NOT_THE_FRAMES = ("SPARK_JOB_CANCELLED", "OPERATION_CANCELED", "INTERNAL_ERROR")
_MOST_CHARACTERS = 500


@dataclass(frozen=True, kw_only=True)
class Feed:
    """A frame whose rows go to the workers through Spark; `keeper` lives as long as the frame is needed."""

    name: str
    frame: DataFrame
    columns: ColumnPlan
    keeper: Any = None


class Where:
    def __init__(self, ids: np.ndarray[Any, Any]) -> None:
        self._ids = ids

    def __call__(self, index: int) -> str:
        row_id = int(self._ids[index])
        if row_id == UNNUMBERED:
            return f"{index} of its batch"
        return describe_row_id(row_id)


def arrow_types(frame: DataFrame) -> dict[str, pa.DataType | None]:
    """None where Arrow has no type."""
    return {field.name: _arrow_type(field.dataType) for field in frame.schema.fields}


def arrow_schema(schema: StructType) -> pa.Schema:
    fields = []
    for field in schema.fields:
        kind = _arrow_type(field.dataType)
        if kind is None:
            name = field.dataType.simpleString()
            raise ConfigError(f"column {field.name!r} is of type {name}, which Arrow does not support.")
        fields.append(pa.field(field.name, kind))
    return pa.schema(fields)


def packed_frame(spark: SparkSession, arrays: Mapping[str, Any]) -> DataFrame:
    """A row's numbers are one binary cell, which costs Spark far less than a list; ragged rows stay lists."""
    return from_arrow(spark, pa.table({name: _packed(array) for name, array in arrays.items()}))


def column(name: str) -> SparkColumn:
    return F.col("`" + name.replace("`", "``") + "`")


def collected(frame: DataFrame, names: Sequence[str], *, rows: int | None = None) -> pa.Table:
    chosen = frame.select(*map(column, names))
    try:
        table = to_arrow(chosen if rows is None else chosen.limit(rows))
    except Exception as exc:  # noqa: BLE001 - what is not the frame's own fault is raised as it is
        raise frame_error(exc, [(frame, names)]) from None
    return table.rename_columns(list(names))


def refuse_ambiguous(frame: DataFrame, names: Sequence[str]) -> None:
    times = Counter(name.lower() for name in frame.columns)
    for name in names:
        if times[name.lower()] == 1:
            continue
        alike = [one for one in frame.columns if one.lower() == name.lower()]
        if frame.sparkSession.conf.get("spark.sql.caseSensitive", "false") == "true":
            alike = [one for one in alike if one == name]
        if len(alike) > 1:
            raise ConfigError(
                f"column {name!r} is ambiguous; the DataFrame has {alike}.\n"
                "Hint: frame.toDF(...) renames all columns."
            )


def feed_frame(feeds: Sequence[Feed], workers: int, dealing: RowAssignment) -> DataFrame:
    """`dealt_rows` in `workers` partitions: partition r has worker r's rows."""
    keys = _constants(partition_keys(workers))
    return dealt_rows(feeds, dealing).repartition(workers, F.element_at(keys, F.col(LANE) % workers + 1))


def dealt_rows(feeds: Sequence[Feed], dealing: RowAssignment) -> DataFrame:
    """All feeds in one frame: their columns (see `own_columns`), `ROW`, `LANE` and `FEED`."""
    # Spark resolves the columns of `mapInArrow` by name, where a dot would mean a field: so none has a name.
    shared = _have_same_types(feeds)
    tagged = []
    for number, feed in enumerate(feeds):
        prefix = _prefix(None if shared else number)
        row = unused_name(ROW, feed.columns.names)
        own = feed.frame.select(*map(column, feed.columns.names), F.monotonically_increasing_id().alias(row))
        sent = own.select(
            *[
                _narrowed(feed.frame, one, f"{number},{i}", row).alias(f"{prefix}{i}")
                for i, one in enumerate(feed.columns.all)
            ],
            F.col(row).alias(ROW),
            F.lit(number).cast("tinyint").alias(FEED),
        )
        tagged.append(sent.select("*", _lane(dealing).alias(LANE)))
    whole = tagged[0]
    for more in tagged[1:]:
        # Feeds of other types keep their own columns, which are null in the rows of the others: a common type
        # would change what the model gets, or there is none.
        whole = whole.unionByName(more, allowMissingColumns=not shared)
    return whole


def _lane(dealing: RowAssignment) -> SparkColumn:
    """As without Spark, twelve neighbours differ modulo twelve, and as many as there are lanes have one
    each. Each stretch takes one of a few random orders, which travel with the plan."""
    groups = dealing.lanes // BASE
    place = F.col(ROW).bitwiseAND(F.lit((1 << ROW_BITS) - 1))
    low = _drawn(dealing, _LOW_ORDERS, BASE, place % BASE, _whole(place, BASE))
    high = _drawn(
        dealing, _HIGH_ORDERS, groups, _whole(place, BASE) % groups, _whole(place, dealing.lanes), low
    )
    kind = "smallint" if dealing.lanes <= _MOST_OF_SHORT else "int"
    return ((high * BASE + low) % dealing.known_lanes).cast(kind)


def _drawn(
    dealing: RowAssignment, orders: int, width: int, place: SparkColumn, *stretch: SparkColumn
) -> SparkColumn:
    hashed = F.xxhash64(F.shiftright(F.col(ROW), ROW_BITS), *stretch, F.lit(dealing.seed))
    choice = F.pmod(hashed, F.lit(orders * width))
    shift = choice % width
    numbers = _constants(dealing.drawn(orders, width))
    return (F.element_at(numbers, (choice - shift + place + 1).cast("int")) + shift) % width


def _whole(number: SparkColumn, divisor: int) -> SparkColumn:
    return F.floor(number / divisor)


def _constants(numbers: Sequence[int]) -> SparkColumn:
    """One constant of the plan: each number on its own would be a JVM call."""
    return F.split(F.lit(",".join(map(str, numbers))), ",").cast("array<int>")


def partition_keys(partitions: int) -> list[int]:
    """An integer for each partition, which Spark's hash partitioning sends there.

    >>> partition_keys(3)
    [0, 1, 11]
    """
    keys: dict[int, int] = {}
    key = 0
    while len(keys) < partitions:
        keys.setdefault(_murmur3(key) % partitions, key)
        key += 1
    return [keys[partition] for partition in range(partitions)]


def _murmur3(number: int) -> int:
    """Spark's hash of an integer: Murmur3 of its four bytes with seed 42, as a signed number."""
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


def own_columns(batch: pa.RecordBatch, names: Sequence[str], number: int) -> pa.RecordBatch:
    prefix = _prefix(None if _prefix(None) + "0" in batch.schema.names else number)
    return pa.RecordBatch.from_arrays(
        [batch.column(f"{prefix}{i}") for i in range(len(names))], names=list(names)
    )


def _prefix(feed: int | None) -> str:
    return "c" if feed is None else f"f{feed}c"


def _narrowed(frame: DataFrame, one: Column, key: str, row: str) -> SparkColumn:
    """Cast doubles to float where possible; one that no float can hold raises `key` and the row's number."""
    kind, value = frame.schema[one.name].dataType, column(one.name)
    if one.dtype not in (None, "float32") or one.ragged:
        return value
    if isinstance(kind, DoubleType):
        return F.when(_unfit(value), _raised(value, key, row)).otherwise(value.cast("float"))
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, DoubleType):
        # For most rows two numbers decide; only where those are infinite, or NaN, each is looked at.
        suspicious = ~((F.array_max(value) < _FLOAT_OVERFLOW) & (F.array_min(value) > -_FLOAT_OVERFLOW))
        first = F.element_at(F.filter(value, _unfit), 1)
        lost = suspicious & F.exists(value, _unfit)
        return F.when(lost, _raised(first, key, row)).otherwise(value.cast("array<float>"))
    return value


def _unfit(value: SparkColumn) -> SparkColumn:
    size = F.abs(value)
    return (size >= _FLOAT_OVERFLOW) & (size < float("inf"))  # to Spark, NaN is more than all others


def _raised(value: SparkColumn, key: str, row: str) -> SparkColumn:
    start, comma, end = (F.lit(text) for text in (f"{_NO_FIT}[{key},", ",", "]"))
    return F.raise_error(F.concat(start, value.cast("string"), comma, F.col(row).cast("string"), end))


def _have_same_types(feeds: Sequence[Feed]) -> bool:
    """Whether all feeds' columns have the same types and options, place by place."""
    kinds = [
        [
            (feed.frame.schema[one.name].dataType.simpleString(), one.dtype, one.ragged)
            for one in feed.columns.all
        ]
        for feed in feeds
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


def _packed(array: Any) -> pa.ChunkedArray:
    if isinstance(array, Ragged):
        return pa.chunked_array([array.to_arrow()])
    rows = max(1, _PACKED_BYTES // max(1, array[:1].nbytes))
    return pa.chunked_array(
        [
            pa.array([row.tobytes() for row in array[start : start + rows]], pa.binary())
            for start in range(0, len(array), rows)
        ],
        pa.binary(),
    )


def frame_error(error: BaseException, frames: Sequence[tuple[DataFrame, Sequence[str]]]) -> BaseException:
    """One line on why Spark could not compute the frames; `error` itself if they are not the cause."""
    if not isinstance(error, PySparkException | Py4JJavaError):
        return error
    text = str(error)
    if unfit := _NO_FIT_PARTS.search(text):
        name = frames[int(unfit[1])][1][int(unfit[2])]
        return DataError(
            f"{float(unfit[3])} (float64) does not fit float32.\n"
            f"Hint: choose another dtype, for example columns=Columns(dtypes={{{name!r}: 'float64'}}).",
            column=name,
            row=describe_row_id(int(unfit[4])),
        )
    if (message := of_task(text)) is not None:
        return DataError(message)
    if _TRACEBACK in text:
        return DataError(_of_python(text))
    condition = condition_of(error) if isinstance(error, PySparkException) else None
    known = condition is not None and condition not in _NOT_THE_FRAMES
    if not known and "\nCaused by: " not in text:
        return error
    column = _assembled(frames) if "VectorAssembler" in text else None
    what = "Spark cannot compute the frame" if column is None else "Spark cannot compute it"
    return DataError(f"{what}: {_reason(text)}", column=column)


def table_frame(spark: SparkSession, table: Table) -> DataFrame:
    """A table at its version, as the session's own source of this format reads it."""
    kind = table.resolved_format()
    reader = spark.read.format(kind).options(**_version_options(table, kind))
    try:
        frame = reader.load(table.place())
        frame.schema  # noqa: B018  Connect looks for the source only now
    except (PySparkException, Py4JJavaError) as exc:
        lines = [line for line in str(exc).splitlines() if line and not line.startswith("An error occurred")]
        why = _CLASS.sub("", lines[0].lstrip(": ")) if lines else type(exc).__name__
        raise ConfigError(f"Spark cannot read it either: {why[:_MOST_CHARACTERS]}") from exc
    return frame


def _version_options(table: Table, kind: str) -> dict[str, str]:
    if table.since is not None:
        raise ConfigError("Spark can read whole versions, not what was added since one.")
    known = {"version": table.version, "snapshot": table.snapshot, **table.chosen}
    if kind == "delta" and known["version"] is not None:
        return {"versionAsOf": str(known["version"])}
    if kind == "iceberg" and isinstance(known["snapshot"], int):
        return {"snapshot-id": str(known["snapshot"])}
    if table.as_of is None:
        raise ConfigError("Spark may read it if version= or snapshot= says which number.")
    if kind == "delta":
        return {"timestampAsOf": table.as_of.isoformat()}
    return {"as-of-timestamp": str(int(table.as_of.timestamp() * 1000))}


def lost_prepared_rows(error: BaseException) -> bool:
    """Whether rows that Spark had prepared for the workers went with a machine, and can be computed again."""
    return _FETCH_FAILED.search(str(error)) is not None


def was_cancelled(error: BaseException) -> bool:
    return _CANCELLED.search(str(error)) is not None


def of_task(text: str) -> str | None:
    """The message of one of our tasks in a Spark error; None if there is none."""
    before, marker, after = text.partition(f"\n\n{TASK_ERROR}")
    if not marker:
        return None
    before = _BEGINNING.split(before)[-1].lstrip()
    lines = before.rpartition(_TRACEBACK)[2].splitlines()  # Spark 3.5 has one before
    said = dropwhile(lambda line: not line or line.startswith(" "), lines)
    return "\n".join(said) + marker + _END.split(after, maxsplit=1)[0].rstrip()


def _of_python(text: str) -> str:
    lines = text.rpartition(_TRACEBACK)[2].splitlines()
    last = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    places: list[str] = []
    for line in lines[:last]:
        if line.startswith("  File "):
            places.append(line)
        elif places and line.strip(" ^~"):
            places[-1] += f"\n{line}"
    own = [place for place in places if "/pyspark/" not in place.partition("\n")[0]]
    raised = lines[last] if last < len(lines) else "an exception without a name"
    return "\n".join([raised, "", "raised by code of the frame, while Spark computed it:", *own])


def _reason(text: str) -> str:
    cause = _END.split(text.rpartition("\nCaused by: ")[2], maxsplit=1)[0].rpartition("failed due to: ")[2]
    cause = _CLASS.sub("", re.sub(r"\s+", " ", cause).strip())
    return re.sub(r"[. ]*SQLSTATE: \w+.*$", ".", cause)[:_MOST_CHARACTERS]


def _assembled(frames: Sequence[tuple[DataFrame, Sequence[str]]]) -> str | None:
    vectors = {
        name
        for frame, names in frames
        for name in names
        if type(frame.schema[name].dataType).__name__ == "VectorUDT"
    }
    return vectors.pop() if len(vectors) == 1 else None
