"""Frames of shards as plain tables, and what SQL does with them: sort, group, merge, describe.

A plain table has string column names, no index, and only types that Spark has too: categories become their
values, unsigned integers the next wider signed type, nanoseconds microseconds. Both homes return plain
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

from kindler.data.columns import Array, unused_name
from kindler.data.shards.codec import META, Info, Packed, table_to_pandas
from kindler.errors import ConfigError, DataError

AGGREGATES = ("count", "count_distinct", "sum", "avg", "min", "max", "stddev", "variance")

_HINT = (
    "Hint: this needs shards that are pandas DataFrames; make them with"
    " transform_shard(lambda shard: pandas.DataFrame(...))."
)
_NUMERIC_ONLY = {"sum", "avg", "stddev", "variance"}
_JOINS = {"inner": "inner", "left": "left outer", "right": "right outer", "outer": "full outer"}
_ALIASES = {"mean": "avg", "std": "stddev", "var": "variance", "countDistinct": "count_distinct"}
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
    pickled = json.loads((schema.metadata or {}).get(META, b"{}")).get("pickled", ())
    return {name: None if i in pickled else schema.field(i).type for i, name in _names(schema)}


def plain_schema(schema: pa.Schema, only: Sequence[str] | None = None) -> pa.Schema:
    meta = json.loads((schema.metadata or {}).get(META, b"{}"))
    names = _names(schema, only)
    for position, name in names:
        if position in meta.get("pickled", ()):
            raise DataError(
                "its values are Python objects of several types, which no table can hold.\n"
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
        raise DataError(f"the shards' columns have types that do not go together: {exc}") from exc


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
    others = [name for name in schema.names if name not in keys]
    if isinstance(agg, Mapping):
        check_columns(list(agg), schema.names, "group_by")
        wanted = {name: [said] if isinstance(said, str) else list(said) for name, said in agg.items()}
        return [_aggregate(function, name, schema) for name, said in wanted.items() for function in said]
    functions = [agg] if isinstance(agg, str) else list(agg)
    wanted_columns = [
        _aggregate(function, name, schema)
        for function in functions
        for name in others
        if is_numeric(schema.field(name).type) or _known(function) not in _NUMERIC_ONLY
    ]
    if not wanted_columns:
        raise ConfigError(f"group_by: {functions} cannot be computed for any of the columns {others}.")
    return wanted_columns


def _known(function: str) -> str:
    name = _ALIASES.get(function, function)
    if name not in AGGREGATES:
        raise ConfigError(f"group_by: unknown aggregate {function!r}; expected one of {sorted(AGGREGATES)}.")
    return name


def _aggregate(function: str, column: str, schema: pa.Schema) -> Aggregate:
    name = _known(function)
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
    numbered = table.append_column(row, pa.array(np.arange(table.num_rows)))
    try:
        first = numbered.group_by(names).aggregate([(row, "min")]).column(f"{row}_min")
    except pa.ArrowNotImplementedError as exc:
        raise DataError(f"rows cannot be compared: {exc}") from exc
    return table.take(pa.array(np.sort(first.to_numpy())))


def grouped(table: pa.Table, keys: Sequence[str], wanted: Sequence[Aggregate], join: bool) -> pa.Table:
    """One row per group in key order, nulls last; with `join`, the rows with group values appended."""
    ids = pa.array(_group_ids(table, keys) if keys else np.zeros(table.num_rows, np.int64))
    _, first = np.unique(ids, return_index=True)
    columns = {key: table.column(key).take(pa.array(first)) for key in keys}
    columns |= {aggregate.name: _aggregated(table, ids, aggregate, by_key=bool(keys)) for aggregate in wanted}
    result = pa.table(columns)
    if not join:
        return result
    rows = result.select([aggregate.name for aggregate in wanted]).take(ids)
    for name in rows.schema.names:
        table = table.append_column(name, rows.column(name))
    return table


def _aggregated(table: pa.Table, ids: pa.Array, aggregate: Aggregate, *, by_key: bool) -> Any:
    options: Any = None
    if aggregate.function in ("stddev", "variance"):
        options = pc.VarianceOptions(ddof=1)
    elif aggregate.function == "count_distinct":
        options = pc.CountOptions(mode="only_valid")
    # Spark's sums of integers and decimals are as wide as can be; its means are doubles.
    arrow = "mean" if aggregate.function == "avg" else aggregate.function
    source = ids if aggregate.column is None else table.column(aggregate.column)
    if aggregate.function in ("avg", "stddev", "variance"):
        source = source.cast(pa.float64())
    rows = pa.table({"group": ids, "value": source})
    done = rows.group_by("group" if by_key else []).aggregate([("value", arrow, options)])
    return (done.sort_by("group") if by_key else done).column(f"value_{arrow}")


def _group_ids(table: pa.Table, names: Sequence[str]) -> Array:
    ids = np.zeros(table.num_rows, np.int64)
    for name in names:
        codes = _codes(table.column(name))
        pairs = ids * (int(codes.max(initial=0)) + 1) + codes
        _, ids = np.unique(pairs, return_inverse=True)
    return ids


def _codes(column: pa.ChunkedArray) -> Array:
    try:
        encoded = column.dictionary_encode().unify_dictionaries().combine_chunks()
        order = pc.sort_indices(encoded.dictionary).to_numpy()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, TypeError) as exc:
        raise DataError(f"values of type {column.type} cannot be grouped.") from exc
    ranks = np.empty(len(order) + 1, np.int64)
    ranks[order] = np.arange(len(order))
    ranks[len(order)] = len(order)
    found: Array = ranks[encoded.indices.fill_null(len(order)).to_numpy()]
    return found


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
        raise DataError(f"{column.type} values do not become {field.type}: {exc}", column=field.name) from exc
