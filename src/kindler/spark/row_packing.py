"""How the columns of a frame travel through Spark's shuffle: as few bytes as the worker will keep of them.

Doubles become floats where the worker would make floats of them, and neighbouring columns of one narrow type
travel as one array: Spark's rows have eight bytes for every number, its arrays as many as the type has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DoubleType,
    FloatType,
    IntegerType,
    ShortType,
)

from kindler.data.columns import Column, Columns
from kindler.data.sources import describe_row_id
from kindler.errors import DataError

_NARROW = (FloatType, IntegerType, ShortType, ByteType)
_FEWEST = 3  # as many columns are worth an array, which has sixteen bytes of its own
_MOST = 1000  # of one array: Spark compiles no method that is too long
_FLOAT_OVERFLOW = 2.0**128 - 2.0**103  # from here on a double rounds to an infinite float
_NO_FIT = "KINDLER_DOES_NOT_FIT"
_NO_FIT_PARTS = re.compile(rf"{_NO_FIT}\[(\d+),(\d+),([^,\]]*),(-?\d+)\]")


@dataclass(frozen=True)
class Sent:
    """What one column of the shuffle holds.

    Attributes:
        first: The number of the first of the frame's columns in it.
        count: How many follow one another in it.
        value: The column as Spark computes it.
        kind: Its type in Spark, as text.
    """

    first: int
    count: int
    value: SparkColumn
    kind: str

    @property
    def name(self) -> str:
        """Tells the receiver what is in it; without a dot, which would mean a field."""
        return f"c{self.first}x{self.count}"


def sent_columns(frame: DataFrame, columns: Columns, *, feed: int, row: str) -> list[Sent]:
    """The columns of a frame as they travel.

    Args:
        frame: The rows.
        columns: What the worker reads of them.
        feed: The number of the feed, for complaints.
        row: The column that says where a row stands, for complaints.
    """
    single = [
        _narrowed(frame, one, number, f"{feed},{number}", row) for number, one in enumerate(columns.all)
    ]
    together: list[Sent] = []
    narrow = {kind().simpleString() for kind in _NARROW}
    for kind, group in groupby(single, key=lambda sent: sent.kind):
        run = list(group)
        together += _joined(run) if kind in narrow else run
    return together


def unpacked(batch: pa.RecordBatch, prefix: str, names: Sequence[str]) -> pa.RecordBatch:
    """The columns of a batch that was sent so, under their own names.

    Args:
        batch: The rows.
        prefix: What stands before the names that `Sent` gives.
        names: The frame's columns.
    """
    arrays: dict[int, pa.Array] = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        found = re.fullmatch(rf"{re.escape(prefix)}c(\d+)x(\d+)", name)
        if found is not None:
            first, count = int(found[1]), int(found[2])
            parts = [array] if count == 1 else _split(array, count)
            arrays.update(zip(range(first, first + count), parts, strict=True))
    return pa.RecordBatch.from_arrays([arrays[number] for number in range(len(names))], names=list(names))


def does_not_fit(text: str, frames: Sequence[tuple[DataFrame, Sequence[str]]]) -> DataError | None:
    """The complaint about a value that no float can hold, if Spark's error carries one."""
    found = _NO_FIT_PARTS.search(text)
    if found is None:
        return None
    name = frames[int(found[1])][1][int(found[2])]
    return DataError(
        f"{float(found[3])} (float64) does not fit float32.\n"
        f"Hint: ask for another dtype, for example dtypes={{{name!r}: 'float64'}}.",
        column=name,
        row=describe_row_id(int(found[4])),
    )


def _narrowed(frame: DataFrame, column: Column, number: int, key: str, row: str) -> Sent:
    kind = frame.schema[column.name].dataType
    value = F.col("`" + column.name.replace("`", "``") + "`")
    becomes_float = column.dtype in (None, "float32") and not column.ragged
    if becomes_float and isinstance(kind, DoubleType):
        checked = F.when(_unfit(value), _complaint(value, key, row)).otherwise(value.cast("float"))
        return Sent(number, 1, checked, "float")
    if becomes_float and isinstance(kind, ArrayType) and isinstance(kind.elementType, DoubleType):
        # Most rows are told by two numbers; only where those are infinite, or not numbers, each is looked at.
        suspicious = ~((F.array_max(value) < _FLOAT_OVERFLOW) & (F.array_min(value) > -_FLOAT_OVERFLOW))
        first = F.element_at(F.filter(value, _unfit), 1)
        lost = suspicious & F.exists(value, _unfit)
        checked = F.when(lost, _complaint(first, key, row)).otherwise(value.cast("array<float>"))
        return Sent(number, 1, checked, "array<float>")
    return Sent(number, 1, value, kind.simpleString())


def _unfit(value: SparkColumn) -> SparkColumn:
    size = F.abs(value)
    return (size >= _FLOAT_OVERFLOW) & (size < float("inf"))  # to Spark, NaN is more than all others


def _complaint(value: SparkColumn, key: str, row: str) -> SparkColumn:
    parts = (
        F.lit(f"{_NO_FIT}[{key},"),
        value.cast("string"),
        F.lit(","),
        F.col(row).cast("string"),
        F.lit("]"),
    )
    return F.raise_error(F.concat(*parts))


def _joined(run: list[Sent]) -> Iterator[Sent]:
    for start in range(0, len(run), _MOST):
        part = run[start : start + _MOST]
        if len(part) < _FEWEST:
            yield from part
        else:
            value = F.array(*[sent.value for sent in part])
            yield Sent(part[0].first, len(part), value, f"array<{part[0].kind}>")


def _split(array: Any, count: int) -> list[pa.Array]:
    """The columns in arrays of one length; elements may be null."""
    inside = array.flatten()
    start = inside.offset * inside.type.bit_width // 8
    numbers = np.frombuffer(inside.buffers()[1], inside.type.to_pandas_dtype(), len(inside), start)
    columns = np.ascontiguousarray(numbers.reshape(-1, count).T)
    if not inside.null_count:
        return [pa.array(column) for column in columns]
    missing = np.array(inside.is_null().to_pylist(), bool).reshape(-1, count).T
    return [pa.array(column, mask=mask) for column, mask in zip(columns, missing, strict=True)]
