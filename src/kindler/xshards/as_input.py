"""Shards as the data of a model: their columns, and how workers get the rows. Shards that no model takes
are refused on the driver, before a worker starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from kindler.data.column_options import ColumnOptions
from kindler.data.columns import Column, ColumnPlan, conform
from kindler.data.shards import frames
from kindler.data.shards.backend import ShardBackend, Work
from kindler.data.shards.codec import Info, unpack
from kindler.data.shards.source import ArrayColumn, ShardSource, array_columns
from kindler.data.sources import DeliveredSource, Source
from kindler.engine.gang import Listener
from kindler.engine.job import Job
from kindler.errors import ConfigError, DataError
from kindler.xshards.collection import XShards
from kindler.xshards.local import LocalShards

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kindler.spark.frames import Feed

_WORKS = (
    "dicts {'x': ..., 'y': ...} of arrays of one length (or tuples, lists and dicts of arrays); or, with"
    " feature_cols and label_cols, pandas DataFrames and dicts {name: array}"
)
_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class Offer:
    """`features` and `labels` are set if the structure of the shards implies them; `infos` has the shards
    with rows by number, or the first if none has any."""

    types: Mapping[str, Any]
    features: tuple[str, ...] | None
    labels: tuple[str, ...] | None
    arrays: Mapping[str, ArrayColumn]
    infos: Mapping[int, Info]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    columns: ColumnPlan
    schema: pa.Schema | None
    arrays: Mapping[str, ArrayColumn]

    def packed(self, column: Column) -> Column:
        """The column with the dtype and the shape of the bytes that its rows travel as."""
        array = self.arrays[column.name]
        return replace(
            column, stored=array.dtype, shape=array.shape if column.shape is None else column.shape
        )


def offer(shards: XShards) -> Offer:
    held = shards._ready()
    infos = {number: info for number, info in enumerate(held.infos) if info.rows} or {0: held.infos[0]}
    first = next(iter(infos))
    if infos[first].kind not in ("arrays", "frame"):
        raise ConfigError(
            f"shard {first} is {_described(held, first)}.\nHint: use transform_shard to make {_WORKS}."
        )
    for number, info in infos.items():
        if info.kind != infos[first].kind:
            raise DataError(
                f"shard {number} is {_described(held, number)}, but shard {first} is"
                f" {_described(held, first)}; all shards must have the same structure."
            )
    if infos[first].kind == "frame":
        types = frames.column_types(infos[first].schema)
        return Offer(types=types, features=None, labels=None, arrays={}, infos=infos)
    columns = array_columns(infos)
    _refuse_unclear(columns, infos[first], first)
    names = {role: tuple(c.name for c in columns if c.role == role) for role in ("feature", "label")}
    inputs = names["feature"] or None
    return Offer(
        types={column.name: None for column in columns},
        features=inputs,
        labels=names["label"] or None if inputs else None,
        arrays={column.name: column for column in columns},
        infos=infos,
    )


def choose(shards: XShards, options: ColumnOptions) -> Chosen:
    """If the options leave it open, the structure of the shards may decide."""
    offered = offer(shards)
    columns = options.or_implied(offered.features, offered.labels).plan(offered.types)
    if offered.arrays:
        for column in columns.all:
            array = offered.arrays[column.name]
            conform(np.empty((0, *array.shape), array.dtype), column, where=str)  # refuses unusable dtypes
        return Chosen(columns=columns, schema=None, arrays=offered.arrays)
    schema = _one_schema(offered.infos, columns.names)
    return Chosen(columns=_as_in_the_frames(columns, offered.infos), schema=schema, arrays={})


def prepare(
    shards: XShards, *, name: str, options: ColumnOptions, spark: SparkSession | None, here: bool
) -> tuple[Source, Feed | None]:
    """A source for the workers, and what Spark must send to them if the shards are in Spark. `spark` None
    means the local engine; `here`, that workers run on this machine."""
    chosen = choose(shards, options)
    if not len(shards):
        raise DataError("the shards have no rows.")
    columns, schema = chosen.columns, chosen.schema
    if spark is None or (here and shards.engine == "local"):
        shards = shards.to_engine("local")
        files: Any = shards._ready()
        files.check()
        folder = str(files.folder.path)
        source = ShardSource(folder=folder, infos=files.infos, columns=columns, schema=schema, keeper=shards)
        return source, None
    from kindler.spark.frames import Feed

    shards = shards.to_engine("spark")
    held: Any = shards._ready()
    if schema is None:
        columns = columns.changed(chosen.packed)
        frame = held.packed_frame(columns.names)
    else:
        frame = held.spark_frame(columns.names)
    return DeliveredSource(columns, name), Feed(name=name, frame=frame, columns=columns, keeper=shards)


def all_have_rows(shards: XShards) -> bool:
    return all(info.rows for info in shards._ready().infos)


def session(shards: XShards) -> SparkSession | None:
    """None if the shards are local."""
    held: Any = shards._ready()
    session: SparkSession | None = held.session if held.engine == "spark" else None
    return session


def worked(shards: XShards, work: Work, job: Job, listener: Listener) -> XShards:
    """Map shards where they live; local ones by the workers of `job`."""
    held = shards._ready()
    if isinstance(held, LocalShards):
        return XShards(held.mapped_by(job, work, listener))
    return XShards(held.mapped(work, by_user=True))


def _one_schema(infos: Mapping[int, Info], names: Sequence[str]) -> pa.Schema:
    schema: pa.Schema | None = None
    for number, info in infos.items():
        present = frames.column_types(info.schema)
        missing = [name for name in names if name not in present]
        if missing:
            raise DataError(
                f"is missing in shard {number}, which has {list(present)}; all shards must have it.",
                column=missing[0],
            )
        mine = frames.plain_schema(info.schema, names)
        try:
            schema = mine if schema is None else frames.together([schema, mine])
        except DataError as exc:
            raise DataError(f"shard {number} has other types than the shards before it: {exc}") from exc
    return schema


def _as_in_the_frames(columns: ColumnPlan, infos: Mapping[int, Info]) -> ColumnPlan:
    """Keep unsigned dtypes, although plain tables hold them in wider types."""
    kinds: dict[str, set[str]] = {}
    for info in infos.values():
        for name, kind in frames.column_types(info.schema).items():
            kinds.setdefault(name, set()).add(_innermost(kind))

    def asked(column: Column) -> Column:
        kind, *others = kinds[column.name]
        if column.dtype is not None or others or not kind.startswith("uint"):
            return column
        return replace(column, dtype="int64" if column.role == "label" else kind)

    return columns.changed(asked)


def _innermost(kind: Any) -> str:
    while kind is not None and pa.types.is_nested(kind) and kind.num_fields == 1:
        kind = kind.field(0).type
    return str(kind)


def _refuse_unclear(columns: Sequence[ArrayColumn], info: Info, number: int) -> None:
    if info.name in ("list", "tuple") and (info.items or 0) > 2:
        raise ConfigError(
            f"shard {number} is a {info.name} of {info.items} arrays; which are inputs and which targets?\n"
            f"Hint: use transform_shard to make {_WORKS}."
        )
    names = [column.name for column in columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"several arrays of a shard are named {twice}; each needs its own name.")


def _described(held: ShardBackend, number: int) -> str:
    thing = unpack(next(iter(held.load([number]))))
    if type(thing) is not dict:
        return _brief(thing)
    shown = [f"{key!r}: {_brief(part)}" for key, part in list(thing.items())[:_SHOWN]]
    more = ["..."] if len(thing) > _SHOWN else []
    return f"a dict with {', '.join([*shown, *more])}" if shown else "an empty dict"


def _brief(thing: Any) -> str:
    if isinstance(thing, np.ndarray):
        return f"an array of {thing.dtype} and shape {thing.shape}"
    if isinstance(thing, list | tuple):
        inside = sorted({type(part).__name__ for part in thing})
        return f"a {type(thing).__name__} of {len(thing)} ({', '.join(inside)})"
    return f"a {type(thing).__name__}"
