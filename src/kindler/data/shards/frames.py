"""Frames of shards as plain tables, and what SQL does with them: sort, group, merge, describe.

A plain table has string column names, no index, and only types that Spark has too: categories become their
values, unsigned integers the next wider signed type, nanoseconds microseconds. Both engines return plain
tables, so that they agree; Spark's functions are in `kindler.spark.shard_frames`, under the same names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kindler.data.columns import unused_name
from kindler.data.shards.codec import Info, Packed, meta, table_to_pandas
from kindler.errors import ConfigError, DataError

AGGREGATES = ("count", "count_distinct", "sum", "avg", "min", "max", "stddev", "variance")

_HINT = (
    "Hint: this needs shards that are pandas DataFrames; make them with"
    " transform_shard(lambda shard: pandas.DataFrame(...))."
)
_NUMERIC_ONLY = {"sum", "avg", "stddev", "variance"}
_JOINS = {"inner": "inner", "left": "left outer", "right": "right outer", "outer": "full outer"}
_ALIASES = {"mean": "avg", "std": "stddev", "var": "variance", "countDistinct": "count_distinct"}
_ARROW = {
    "avg": ("mean", None),
    "stddev": ("stddev", pc.VarianceOptions(ddof=1)),
    "variance": ("variance", pc.VarianceOptions(ddof=1)),
    "count_distinct": ("count_distinct", pc.CountOptions(mode="only_valid")),
}
_WHOLE = (
    pa.types.is_integer, pa.types.is_boolean, pa.types.is_timestamp, pa.types.is_duration, pa.types.is_time64
)  # fmt: skip
_WIDER = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
    pa.date64(): pa.date32(),
}


@dataclass(frozen=True, slots=True)
class Aggregate:
    """One result column, named like `sum(x)`; without a column it counts rows."""

    function: str
    column: str | None = None

    @property
    def name(self) -> str:
        return self.function if self.column is None else f"{self.function}({self.column})"


def column_types(schema: pa.Schema) -> dict[str, pa.DataType | None]:
    pickled = meta(schema).get("pickled", ())
    return {name: None if i in pickled else schema.field(i).type for i, name in _names(schema)}


def plain_schema(schema: pa.Schema, only: Sequence[str] | None = None) -> pa.Schema:
    names, pickled = _names(schema, only), meta(schema).get("pickled", ())
    for position, name in names:
        if position in pickled:
            raise DataError(
                "its values are Python objects of several types, which a table cannot hold.\n"
                "Hint: give it one dtype first, with transform_shard.",
                column=name,
            )
    return pa.schema([pa.field(new, _plain_type(schema.field(i).type)) for i, new in names])


def plain(packed: Packed, only: Sequence[str] | None = None) -> pa.Table:
    if packed.info.kind not in ("frame", "series"):
        raise DataError(f"expected a pandas DataFrame, received a {packed.info.name}.\n{_HINT}")
    wanted = plain_schema(packed.table.schema, only)
    columns = [packed.table.column(i) for i, _ in _names(packed.table.schema, only)]
    return pa.table(
        [_cast(column, field) for column, field in zip(columns, wanted, strict=True)], schema=wanted
    )


def together(schemas: Sequence[pa.Schema]) -> pa.Schema:
    try:
        return pa.unify_schemas([s.remove_metadata() for s in schemas], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as exc:
        raise DataError(f"the shards' columns have incompatible types: {exc}") from exc


def schema_of(infos: Sequence[Info], only: Sequence[str] | None = None, what: str = "") -> pa.Schema:
    for number, info in enumerate(infos):
        if info.kind not in ("frame", "series") or info.schema is None:
            raise DataError(f"expected pandas DataFrames; shard {number} is a {info.name}.\n{_HINT}")
        if only is not None:
            check_columns(only, [name for _, name in _names(info.schema)], what)
    told = [info for info in infos if info.rows] or infos[:1]  # without rows, a type says nothing
    return together([plain_schema(info.schema, only) for info in told])


def whole(tables: Sequence[pa.Table]) -> pa.Table:
    schema = together([table.schema for table in tables if table.num_rows] or [tables[0].schema])
    return pa.concat_tables([conform(table, schema) for table in tables])


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    if not table.num_rows:
        return schema.empty_table()
    missing = [name for name in schema.names if name not in table.schema.names]
    for name in missing:
        table = table.append_column(name, pa.nulls(table.num_rows, schema.field(name).type))
    return table.select(schema.names).cast(schema)


def is_numeric(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def check_columns(names: Sequence[str], present: Sequence[str], what: str) -> None:
    missing = [name for name in names if name not in present]
    if missing:
        raise ConfigError(f"{what}: there is no column {missing[0]!r}; the columns are {list(present)}.")


def aggregates(
    agg: str | Sequence[str] | Mapping[str, str | Sequence[str]], keys: Sequence[str], schema: pa.Schema
) -> list[Aggregate]:
    """Validate and expand the aggregates of `group_by`.

    >>> schema = pa.schema({"k": pa.int64(), "x": pa.float64(), "s": pa.string()})
    >>> [a.name for a in aggregates(["sum", "max"], ["k"], schema)]
    ['sum(x)', 'max(x)', 'max(s)']
    >>> [a.name for a in aggregates("count", ["k"], schema)]
    ['count']
    """
    if agg == "count":
        return [Aggregate("count")]
    if isinstance(agg, Mapping):
        check_columns(list(agg), schema.names, "group_by")
        return [_aggregate(f, name, schema) for name, said in agg.items() for f in _listed(said)]
    others = [name for name in schema.names if name not in keys]
    wanted = [
        _aggregate(function, name, schema)
        for function in _listed(agg)
        for name in others
        if is_numeric(schema.field(name).type) or _ALIASES.get(function, function) not in _NUMERIC_ONLY
    ]
    if not wanted:
        raise ConfigError(f"group_by: {_listed(agg)} cannot be computed for any of the columns {others}.")
    return wanted


def _listed(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _aggregate(function: str, column: str, schema: pa.Schema) -> Aggregate:
    name = _ALIASES.get(function, function)
    if name not in AGGREGATES:
        raise ConfigError(f"group_by: unknown aggregate {function!r}; expected one of {sorted(AGGREGATES)}.")
    if name in _NUMERIC_ONLY and not is_numeric(schema.field(column).type):
        raise ConfigError(
            f"group_by: {name} needs numbers, and column {column!r} has type {schema.field(column).type}."
        )
    return Aggregate(name, column)


def sorted_rows(table: pa.Table, names: Sequence[str], ascending: Sequence[bool]) -> pa.Table:
    """Stable sort, nulls last."""
    keys = [(name, "ascending" if up else "descending") for name, up in zip(names, ascending, strict=True)]
    return table.take(pc.sort_indices(table, sort_keys=keys))


def distinct(table: pa.Table) -> pa.Table:
    """Keeps the first of equal rows."""
    if not table.num_rows:
        return table
    names = table.schema.names
    row = unused_name("row", [*names, *(name.removesuffix("_min") for name in names)])
    keys = pa.table({name: _key(table.column(name)) for name in names})
    numbered = keys.append_column(row, pa.array(np.arange(table.num_rows)))
    try:
        first = numbered.group_by(names).aggregate([(row, "min")]).column(f"{row}_min")
    except pa.ArrowNotImplementedError as exc:
        raise DataError(f"rows cannot be compared: {exc}") from exc
    return table.take(pa.array(np.sort(first.to_numpy())))


def grouped(table: pa.Table, keys: Sequence[str], wanted: Sequence[Aggregate], join: bool) -> pa.Table:
    """One row per group in key order, nulls last; with `join`, the rows with group values appended."""
    columns = {f"k{i}": _key(table.column(key)) for i, key in enumerate(keys)}
    columns |= {f"v{i}": _source(table, aggregate) for i, aggregate in enumerate(wanted)}
    columns["row"] = pa.array(np.arange(table.num_rows))
    functions = [_ARROW.get(aggregate.function, (aggregate.function, None)) for aggregate in wanted]
    asked: list[Any] = [(f"v{i}", name, options) for i, (name, options) in enumerate(functions)]
    by = [f"k{i}" for i in range(len(keys))]
    try:
        done = pa.table(columns).group_by(by).aggregate(asked + ([("row", "list")] if by and join else []))
    except pa.ArrowNotImplementedError as exc:
        raise DataError(f"rows cannot be grouped by {list(keys)}: {exc}") from exc
    values = {a.name: f"v{i}_{functions[i][0]}" for i, a in enumerate(wanted)}
    if not join:
        done = done.sort_by([(name, "ascending") for name in by]) if by else done
        values = {**dict(zip(keys, by, strict=True)), **values}
        return pa.table({name: done.column(column) for name, column in values.items()})
    groups = np.zeros(table.num_rows, np.int64)
    if by:
        rows_of = done.column("row_list").combine_chunks()
        groups[pc.list_flatten(rows_of).to_numpy()] = pc.list_parent_indices(rows_of).to_numpy()
    for name, column in values.items():
        table = table.append_column(name, done.column(column).take(pa.array(groups)))
    return table


def _key(column: pa.ChunkedArray) -> Any:
    """The column with -0.0 as 0.0: Arrow takes them for two keys where there are several columns."""
    return (
        pc.add(column, pa.scalar(0.0, column.type)) if column.type in (pa.float32(), pa.float64()) else column
    )


def _source(table: pa.Table, aggregate: Aggregate) -> Any:
    if aggregate.column is None:
        return pa.array(np.zeros(table.num_rows, np.int64))
    column = table.column(aggregate.column)
    # Spark's sums of integers and decimals are as wide as can be; its means are doubles.
    return column.cast(pa.float64()) if aggregate.function in ("avg", "stddev", "variance") else column


@dataclass(frozen=True, slots=True)
class MergeNames:
    on: tuple[str, ...]
    left: tuple[tuple[str, str], ...]
    right: tuple[tuple[str, str], ...]


def merge_names(left: Sequence[str], right: Sequence[str], on: str | Sequence[str] | None) -> MergeNames:
    if on is None:
        keys = [name for name in left if name in right]
        if not keys:
            raise ConfigError(f"merge: {list(left)} and {list(right)} share no column.\nHint: pass on=.")
    else:
        keys = [on] if isinstance(on, str) else list(on)
    check_columns(keys, left, "merge")
    check_columns(keys, right, "merge")
    both = {name for name in left if name in right and name not in keys}
    return MergeNames(
        tuple(keys),
        tuple((name, f"{name}_x" if name in both else name) for name in left if name not in keys),
        tuple((name, f"{name}_y" if name in both else name) for name in right if name not in keys),
    )


def merged(left: pa.Table, right: pa.Table, how: str, names: MergeNames) -> pa.Table:
    """Rows with equal keys, in left and then right order; null equals nothing."""
    keys = together([left.select(list(names.on)).schema, right.select(list(names.on)).schema])
    sides = []
    for table, number in ((left, "l"), (right, "r")):
        side = conform(table.select(list(names.on)), keys)
        sides.append(side.append_column(number, pa.array(np.arange(table.num_rows))))
    pairs = sides[0].join(sides[1], keys=list(names.on), join_type=_JOINS[how]).select(["l", "r"])
    pairs = pairs.sort_by([("l", "ascending"), ("r", "ascending")])
    at_left, at_right = pairs.column("l").combine_chunks(), pairs.column("r").combine_chunks()
    ours, theirs = sides[0].take(at_left), sides[1].take(at_right)
    result = {name: pc.coalesce(ours.column(name), theirs.column(name)) for name in names.on}
    result |= {new: left.column(old).take(at_left) for old, new in names.left}
    result |= {new: right.column(old).take(at_right) for old, new in names.right}
    return pa.table(result)


def row_hashes(table: pa.Table) -> Any:
    """Equal rows have equal hashes, in every process and whatever the chunks; the types must be plain."""
    import pandas as pd

    values = {i: _hashable(column) for i, column in enumerate(table.columns)}
    return pd.util.hash_pandas_object(pd.DataFrame(values), index=False).to_numpy()


def _hashable(column: pa.ChunkedArray) -> Any:
    kind = column.type
    if pa.types.is_floating(kind):
        return column.cast(pa.float64()).to_numpy() + 0.0  # so that -0.0 is 0.0
    if any(is_kind(kind) for is_kind in _WHOLE):
        return column.cast(pa.int64()).fill_null(0).to_numpy()
    try:
        return (column if pa.types.is_binary(kind) else column.cast(pa.string())).to_numpy()
    except pa.ArrowNotImplementedError as exc:
        raise DataError(f"values of type {kind} cannot be used to assign rows to shards.") from exc


def described(table: pa.Table, names: Sequence[str]) -> Any:
    frame = table_to_pandas(table.select(list(names)))
    return frame.astype("float64").describe()


def _names(schema: pa.Schema, only: Sequence[str] | None = None) -> list[tuple[int, str]]:
    """(position, name) of the data columns, without the index."""
    noted = json.loads((schema.metadata or {}).get(b"pandas", b"{}"))
    index = {entry for entry in noted.get("index_columns", ()) if isinstance(entry, str)}
    data = [(i, name) for i, name in enumerate(schema.names) if name not in index]
    return [(i, name) for i, name in data if only is None or name in only]


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_duration(kind):
        return pa.duration("us")
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_type(kind.value_type))
    return _WIDER.get(kind, kind)


def _cast(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    if column.type == field.type:
        return column
    if isinstance(column.type, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    try:
        # Nanoseconds lose their last digits by design.
        return column.cast(field.type, safe=not pa.types.is_temporal(field.type))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
        raise DataError(
            f"{column.type} values cannot be converted to {field.type}: {exc}", column=field.name
        ) from exc
