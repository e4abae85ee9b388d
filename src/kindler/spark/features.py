"""Spark SQL for `kindler.features`; no Python runs on rows. Statistics are computed at once; changes of
columns are lazy, and raise when rows are computed."""

from __future__ import annotations

from collections.abc import Sequence
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


def value_counts(frame: DataFrame, name: str) -> dict[Any, int]:
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
    """In `complaint`, "'<value>'" stands for a value that is not a label."""
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


def number_moments(frame: DataFrame, names: Sequence[str]) -> tuple[bool, list[Sequence[float]]]:
    """Whether it holds vectors, and (count, mean, sum of squared deviations, min, max) per place."""
    kinds = [_shape(frame.schema[name].dataType, name) for name in names]
    vector = kinds[0] != "number" and len(names) == 1
    for name, kind in zip(names, kinds, strict=True):
        if kind != "number" and not vector:
            raise DataError("it holds vectors; several columns must be columns of numbers.", column=name)
    values = _array(frame, names[0]) if vector else F.array(*[_column(name).cast("double") for name in names])
    value = F.when(~F.isnan("value"), F.col("value"))
    measures = [
        F.count(value), F.avg(value), F.var_pop(value) * F.count(value), F.min(value), F.max(value),
    ]  # fmt: skip
    rows = (
        frame.select(F.posexplode(values).alias("place", "value"))
        .groupBy("place")
        .agg(F.count(F.lit(1)), *measures)
        .orderBy("place")
        .collect()
    )
    for row in rows:
        if row[1] != rows[0][1]:
            raise DataError(
                f"some vectors have {row['place']} values and others more; all must have the same length.",
                column=names[0],
            )
    none = (0, 0.0, 0.0, float("inf"), float("-inf"))
    return vector, [tuple(row)[2:] if row[2] else none for row in rows]


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
    """Nulls stay nulls; one output for several columns is an array."""
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
        F.lit(f" values where the scaler was fitted on {len(center)}."),
    )
    return (
        F.when(values.isNull(), None)
        .when(F.size(values) != len(center), F.raise_error(wrong))
        .otherwise(
            F.transform(values, lambda x, i: (x - F.get(centers, i)) * F.get(factors, i) + F.lit(offset))
        )
    )


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
    column = _column(name)
    if frame.schema[name].dataType.typeName() in ("float", "double"):
        return F.when(~F.isnan(column), column)
    return column


def _literal(values: Sequence[float]) -> Column:
    """One expression: a column object per number would cost a JVM call each."""
    return F.expr(f"array({', '.join(f'{value!r}D' for value in values)})")
