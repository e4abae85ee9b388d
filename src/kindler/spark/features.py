"""What `kindler.features` asks of Spark DataFrames, in SQL: nothing here runs Python on rows.

Counting and measuring run at once; what changes columns is lazy, and raises when rows are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.ml.functions import vector_to_array
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BooleanType, DataType, NumericType, StringType

from kindler.data.columns import unused_name
from kindler.errors import DataError
from kindler.spark.frames import column as _column
from kindler.spark.versions import from_arrow, to_arrow


@dataclass(frozen=True)
class Measured:
    """Columns of numbers in the order: count, mean, sum of squared distances from it, smallest, largest."""

    columns: tuple[Sequence[float], ...]
    vector: bool


def value_counts(frame: DataFrame, name: str) -> dict[Any, int]:
    """Value -> how many rows have it; missing values are left out."""
    kind = frame.schema[name].dataType
    if not isinstance(kind, StringType | NumericType | BooleanType):
        raise DataError(
            f"values of type {kind.simpleString()} cannot be indexed.\nHint: convert them to strings first.",
            column=name,
        )
    value = _present(frame, name)
    counted = to_arrow(frame.select(value.alias("key")).where("key IS NOT NULL").groupBy("key").count())
    return dict(zip(counted.column(0).to_pylist(), counted.column(1).to_pylist(), strict=True))


def indexed(
    frame: DataFrame,
    name: str,
    output: str,
    labels: Sequence[Any],
    *,
    first: int,
    invalid: str,
    complaint: str,
) -> DataFrame:
    """The frame with the place of each value among the labels, in the column `output`.

    Args:
        frame: Any, a stream too.
        name: The column of values.
        output: The column of places; one of this name is replaced.
        labels: The values in order.
        first: The place of the first.
        invalid: "error", "keep" or "skip", for values that are no labels.
        complaint: The error's message; "<value>" stands for the value, with quotes.
    """
    # The keys are few and go to every task, so that rows stay where they are and in their order.
    label, number = (unused_name(own, frame.columns) for own in ("_kindler_key", "_kindler_code"))
    numbers = pa.array(range(first, first + len(labels)), pa.int64())
    table = pa.table({label: pa.array(labels), number: numbers})
    keys = F.broadcast(from_arrow(frame.sparkSession, table))
    names = frame.columns
    joined = frame.join(keys, _column(name) == F.col(label), "left")
    code = F.col(number)
    if invalid == "skip":
        joined = joined.where(code.isNotNull())
    elif invalid == "keep":
        code = F.coalesce(code, F.lit(first + len(labels)).cast("long"))
    else:
        before, _, after = complaint.partition("'<value>'")
        value = F.coalesce(_column(name).cast("string"), F.lit("null"))
        message = F.concat(F.lit(before + "'"), value, F.lit("'" + after))
        code = F.when(code.isNull(), F.raise_error(message)).otherwise(code)
    kept = [code.alias(output) if column == output else _column(column) for column in names]
    return joined.select(*kept, *([] if output in names else [code.alias(output)]))


def number_moments(frame: DataFrame, names: Sequence[str]) -> Measured:
    """Count, mean, sum of squares and extremes of columns, or of each place of one column of vectors."""
    kinds = [_shape(frame.schema[name].dataType, name) for name in names]
    if kinds == ["vector"] or kinds == ["array"]:
        return _vector_moments(frame, names[0])
    for name, kind in zip(names, kinds, strict=True):
        if kind != "number":
            raise DataError("it holds vectors; several columns must be columns of numbers.", column=name)
    asked = [part for name in names for part in _measures(_present(frame, name).cast("double"))]
    row = frame.agg(*[part.alias(f"m{i}") for i, part in enumerate(asked)]).collect()[0]
    return _measured([row[i : i + 5] for i in range(0, len(asked), 5)], vector=False)


def scaled(
    frame: DataFrame,
    names: Sequence[str],
    outputs: Sequence[str],
    *,
    center: Sequence[float],
    factor: Sequence[float],
    offset: float,
    vector: bool,
) -> DataFrame:
    """`(value - center) * factor + offset`, for columns or for places of vectors; nulls stay nulls.

    One output for several columns is an array.
    """
    kinds = [_shape(frame.schema[name].dataType, name) for name in names]
    for name, kind in zip(names, kinds, strict=True):
        if (kind == "number") == vector:
            have, want = ("numbers", "vectors") if kind == "number" else ("vectors", "numbers")
            raise DataError(f"it has {have}, but the scaler was fitted on {want}.", column=name)
    if vector:
        return frame.withColumns({outputs[0]: _scaled_vector(frame, names[0], center, factor, offset)})
    columns = [
        (_column(name).cast("double") - F.lit(c)) * F.lit(f) + F.lit(offset)
        for name, c, f in zip(names, center, factor, strict=True)
    ]
    if len(outputs) < len(names):
        return frame.withColumns({outputs[0]: F.array(*columns)})
    return frame.withColumns(dict(zip(outputs, columns, strict=True)))


def _scaled_vector(
    frame: DataFrame, name: str, center: Sequence[float], factor: Sequence[float], offset: float
) -> Column:
    values, centers, factors = _array(frame, name), _literal(center), _literal(factor)
    wrong = F.concat(
        F.lit(f"column {name!r}: has "),
        F.size(values).cast("string"),
        F.lit(f" values where the scaler has learned from {len(center)}."),
    )
    return (
        F.when(values.isNull(), None)
        .when(F.size(values) != len(center), F.raise_error(wrong))
        .otherwise(
            F.transform(values, lambda x, i: (x - F.get(centers, i)) * F.get(factors, i) + F.lit(offset))
        )
    )


def _vector_moments(frame: DataFrame, name: str) -> Measured:
    places = frame.select(F.posexplode(_array(frame, name)).alias("place", "value"))
    value = F.when(~F.isnan("value"), F.col("value"))
    rows = (
        places.groupBy("place")
        .agg(
            F.count(F.lit(1)).alias("rows"), *[part.alias(f"m{i}") for i, part in enumerate(_measures(value))]
        )
        .orderBy("place")
        .collect()
    )
    for row in rows:
        if row["rows"] != rows[0]["rows"]:
            raise DataError(
                f"some vectors have {row['place']} values and others more; all must have the same length.",
                column=name,
            )
    return _measured([row[2:] for row in rows], vector=True)


def _measures(value: Column) -> list[Column]:
    return [F.count(value), F.avg(value), F.var_pop(value), F.min(value), F.max(value)]


def _measured(rows: Sequence[Sequence[Any]], *, vector: bool) -> Measured:
    count = [row[0] for row in rows]
    mean, variance = ([row[i] or 0.0 for row in rows] for i in (1, 2))
    squares = [v * n for v, n in zip(variance, count, strict=True)]
    low, high = (
        [end if row[i] is None else row[i] for row in rows]
        for i, end in ((3, float("inf")), (4, float("-inf")))
    )
    return Measured((count, mean, squares, low, high), vector)


def _shape(kind: DataType, name: str) -> str:
    if isinstance(kind, NumericType | BooleanType):
        return "number"
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, NumericType):
        return "array"
    if type(kind).__name__ == "VectorUDT":
        return "vector"
    raise DataError(f"values of type {kind.simpleString()} are not numbers.", column=name)


def _array(frame: DataFrame, name: str) -> Column:
    if _shape(frame.schema[name].dataType, name) == "vector":
        return vector_to_array(_column(name))
    return _column(name).cast("array<double>")


def _present(frame: DataFrame, name: str) -> Column:
    """The column's values, null for NaN too."""
    column = _column(name)
    if frame.schema[name].dataType.typeName() in ("float", "double"):
        return F.when(~F.isnan(column), column)
    return column


def _literal(values: Sequence[float]) -> Column:
    """An array as one expression: a column object for each number would take a call to the JVM each."""
    return F.expr(f"array({', '.join(f'{value!r}D' for value in values)})")
