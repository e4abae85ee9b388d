"""SQL on the frames of shards, by Spark; `kindler.data.shards.frames` says what each operation means. The
last column of every input frame is the row's place in the collection, so that results have an order
that does not depend on how Spark distributes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from kindler.data.columns import unused_name
from kindler.data.shards.frames import Aggregate, MergeNames
from kindler.spark.frames import column as _column

_SHARD_SHIFT = 40  # the shard above, the row in it below
_QUARTILES = (0.25, 0.5, 0.75)
_MEASURES = ("count", "mean", "std", "min", "25%", "50%", "75%", "max")


def place_column(names: Sequence[str]) -> str:
    return unused_name("_kindler_place", names)


def place(shard: int, rows: int) -> pa.Array:
    return pa.array(np.arange(rows, dtype=np.int64) + (shard << _SHARD_SHIFT))


def sorted_rows(
    frame: DataFrame, names: Sequence[str], ascending: Sequence[bool], *, count: int
) -> DataFrame:
    order = [
        _column(name).asc_nulls_last() if up else _column(name).desc_nulls_last()
        for name, up in zip(names, ascending, strict=True)
    ]
    row = frame.columns[-1]
    return _ordered(frame, [*order, F.col(row).asc()], count).drop(row)


def distinct(frame: DataFrame, *, count: int) -> DataFrame:
    *names, row = frame.columns
    first = frame.groupBy(*map(_column, names)).agg(F.min(row).alias(row))
    return _ordered(first, [F.col(row).asc()], count).drop(row)


def grouped(
    frame: DataFrame, keys: Sequence[str], wanted: Sequence[Aggregate], join: bool, *, count: int
) -> DataFrame:
    done = frame.groupBy(*map(_column, keys)).agg(*map(_aggregated, wanted))
    if not join:
        if not keys:
            return done.coalesce(1)
        return _ordered(done, [_column(key).asc_nulls_last() for key in keys], count)
    row = frame.columns[-1]
    names = [unused_name(f"_kindler_key{i}", frame.columns) for i in range(len(keys))]
    done = done.toDF(*names, *[aggregate.name for aggregate in wanted])
    same = [_column(key).eqNullSafe(F.col(name)) for key, name in zip(keys, names, strict=True)]
    both = frame.join(done, reduce(and_, same)) if same else frame.crossJoin(done)
    return _ordered(both, [F.col(row).asc()], count).drop(row, *names)


def merged(left: DataFrame, right: DataFrame, how: str, names: MergeNames, *, count: int) -> DataFrame:
    ours, theirs = _apart(left, "l"), _apart(right, "r")
    at = {name: i for i, name in enumerate(left.columns)}
    to = {name: i for i, name in enumerate(right.columns)}
    same = [F.col(f"l{at[key]}") == F.col(f"r{to[key]}") for key in names.on]
    joined = ours.join(theirs, reduce(and_, same), "full" if how == "outer" else how)
    places = [F.col(f"l{len(at) - 1}").asc_nulls_last(), F.col(f"r{len(to) - 1}").asc_nulls_last()]
    return _ordered(joined, places, count).select(
        *[F.coalesce(f"l{at[key]}", f"r{to[key]}").alias(key) for key in names.on],
        *[F.col(f"l{at[old]}").alias(new) for old, new in names.left],
        *[F.col(f"r{to[old]}").alias(new) for old, new in names.right],
    )


def described(frame: DataFrame, names: Sequence[str]) -> Any:
    """As pandas' `describe`; quartiles are exact."""
    import pandas as pd

    wanted: list[Column] = []
    for name in names:
        value = _column(name).cast("double")
        quartiles = F.percentile(value, list(_QUARTILES))
        wanted += [F.count(value).cast("double"), F.avg(value), F.stddev_samp(value), F.min(value)]
        wanted += [quartiles[i] for i in range(len(_QUARTILES))] + [F.max(value)]
    row = frame.agg(*[column.alias(f"m{i}") for i, column in enumerate(wanted)]).collect()[0]
    width = len(_MEASURES)
    values = {name: row[i * width : (i + 1) * width] for i, name in enumerate(names)}
    return pd.DataFrame(values, index=list(_MEASURES), dtype="float64")


def _ordered(frame: DataFrame, order: Sequence[Column], count: int) -> DataFrame:
    return frame.repartitionByRange(count, *order).sortWithinPartitions(*order)


def _apart(frame: DataFrame, side: str) -> DataFrame:
    """Renames columns so that the sides do not clash."""
    return frame.toDF(*[f"{side}{i}" for i in range(len(frame.columns))])


def _aggregated(aggregate: Aggregate) -> Column:
    if aggregate.column is None:
        return F.count(F.lit(1)).alias(aggregate.name)
    column = _column(aggregate.column)
    if aggregate.function in ("avg", "stddev", "variance"):
        column = column.cast("double")
    function = {"stddev": "stddev_samp", "variance": "var_samp"}.get(aggregate.function, aggregate.function)
    made: Column = getattr(F, function)(column).alias(aggregate.name)
    return made
