"""Operations on one shard. Module-level functions with plain arguments, as they are sent to workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from kindler.data.columns import Array
from kindler.data.shards import frames, pytree, rows
from kindler.data.shards.codec import Packed, pack, unpack
from kindler.errors import ConfigError, DataError
from kindler.xshards.shared_value import unwrapped

Step = tuple[Callable[..., Any], tuple[Any, ...]]


def transformed(steps: Sequence[Step], number: int, packed: Packed) -> Packed:
    thing = unpack(packed)
    for function, arguments in steps:
        thing = function(thing, *(unwrapped(argument) for argument in arguments))
    return pack(thing)


def cut_by_rows(
    pieces: Sequence[Sequence[tuple[int, int, int]]], empty: Sequence[int], number: int, packed: Packed
) -> Iterable[tuple[int, Packed]]:
    """Pieces by row numbers (see `rows.overlaps`); every new shard gets one, possibly empty."""
    if number == 0:
        yield from ((target, rows.cut(packed, 0, 0)) for target in empty)
    for target, start, stop in pieces[number]:
        yield target, rows.cut(packed, start, stop)


def cut_by_hash(
    columns: Sequence[str], schema: pa.Schema, count: int, number: int, packed: Packed
) -> Iterable[tuple[int, Packed]]:
    table = frames.conform(frames.plain(packed, columns), schema)
    targets = rows.column_hashes([table.column(name) for name in columns]) % np.uint64(count)
    order = np.argsort(targets, kind="stable")
    edges = np.searchsorted(targets[order], np.arange(count + 1, dtype=np.uint64))
    for target in range(count):
        chosen = order[edges[target] : edges[target + 1]]
        if len(chosen) or number == 0:
            yield target, rows.taken(packed, chosen)


def cut_to_lists(targets: Sequence[int], number: int, packed: Packed) -> Iterable[tuple[int, Packed]]:
    yield targets[number], pack([_Whole(unpack(packed))])


@dataclass(frozen=True)
class _Whole:
    """Hides an object from the codec."""

    thing: Any


def opened(number: int, packed: Packed) -> Packed:
    return pack([whole.thing for whole in unpack(packed)])


def as_frame(number: int, packed: Packed) -> Any:
    thing = unpack(packed)
    if not pytree.is_frame(thing):
        raise DataError(
            f"expected pandas DataFrames; shard {number} is a {type(thing).__name__}.\n"
            "Hint: transform_shard can convert the shards."
        )
    return thing


def as_pandas(number: int, thing: Any) -> Any:
    if not (pytree.is_frame(thing) or pytree.is_series(thing)):
        raise DataError(f"expected DataFrames or Series; shard {number} is a {type(thing).__name__}.")
    return thing


def picked(key: Any, number: int, packed: Packed) -> Packed:
    thing = unpack(packed)
    if pytree.is_frame(thing) or type(thing) is dict:
        keys = [key] if not isinstance(key, list) else key
        missing = [k for k in keys if k not in thing]
        if missing:
            raise ConfigError(f"no {missing[0]!r} in shard {number}; available: {list(thing)}.")
        return pack(thing[key])
    raise ConfigError(
        f"shards[{key!r}] needs shards that are pandas DataFrames or dicts; shard {number} is a"
        f" {type(thing).__name__}."
    )


def item(position: int, number: int, packed: Packed) -> Packed:
    return pack(unpack(packed)[position])


def selected(columns: Sequence[str], number: int, packed: Packed) -> Packed:
    frame = as_frame(number, packed)
    frames.check_columns(columns, list(frame.columns), "select")
    return pack(frame[list(columns)])


def sampled(counts: Sequence[int], seed: int, replace: bool, number: int, packed: Packed) -> Packed:
    random = np.random.default_rng([seed, number])
    return rows.taken(packed, random.choice(packed.info.rows, counts[number], replace=replace))


def without_missing(number: int, packed: Packed) -> Packed:
    return pack(as_frame(number, packed).dropna())


def first_rows(counts: Sequence[int], number: int, packed: Packed) -> Packed:
    return rows.cut(packed, 0, counts[number])


def null_counts(number: int, packed: Packed) -> Packed:
    counts = as_frame(number, packed).isna().sum()
    return pack([(name, int(count)) for name, count in counts.items()])


def maximum(column: str, number: int, packed: Packed) -> Packed:
    frame = as_frame(number, packed)
    frames.check_columns([column], list(frame.columns), "max_values")
    present = frame[column].dropna()
    return pack({"values": [present.max()] if len(present) else []})


def unique_values(number: int, packed: Packed) -> Packed:
    import pandas as pd

    series = unpack(packed)
    if not pytree.is_series(series):
        raise DataError(
            f"unique: expected pandas Series; shard {number} is a {type(series).__name__}.\n"
            "Hint: choose a column first, as in shards['a'].unique()."
        )
    if isinstance(series.dtype, pd.CategoricalDtype):
        series = series.astype(series.cat.categories.dtype)
    return pack(series.drop_duplicates())


def assembled(features: Sequence[str], labels: Sequence[str], number: int, packed: Packed) -> Packed:
    frame = as_frame(number, packed)
    frames.check_columns([*features, *labels], list(frame.columns), "assembleFeatureLabelCols")
    return pack({"x": _matrix(frame, features), "y": _matrix(frame, labels)})


def stacked(number: int, packed: Packed) -> Packed:
    pairs = unpack(packed)
    pairs = [pairs] if type(pairs) is tuple else pairs
    if not isinstance(pairs, list) or not all(isinstance(p, tuple | list) and len(p) == 2 for p in pairs):
        raise DataError(
            f"expected a pair (feature, label) or a list of pairs as shard {number}.\n"
            "Hint: transform_shard can convert the shards."
        )
    try:
        x, y = (_narrow(np.stack([pair[i] for pair in pairs])) for i in range(2))
    except ValueError as exc:
        raise DataError(f"the samples of shard {number} differ in shape: {exc}") from exc
    return pack({"x": x, "y": y})


def _matrix(frame: Any, names: Sequence[str]) -> Array:
    columns = [_numbers(frame[name], name) for name in names]
    wide = [column.reshape(len(frame), int(np.prod(column.shape[1:]))) for column in columns]
    return _narrow(np.concatenate(wide, axis=1) if wide else np.empty((len(frame), 0), np.float32))


def _numbers(column: Any, name: str) -> Array:
    try:
        values: Array = column.to_numpy()
        if values.dtype == object and len(values) and isinstance(values[0], np.ndarray | list):
            values = np.stack([np.asarray(cell) for cell in values])
        if values.dtype == object:
            values = column.to_numpy(dtype="float64")
    except (ValueError, TypeError) as exc:
        raise DataError(f"cannot convert the values to one array: {exc}", column=name) from exc
    if values.dtype.kind not in "biuf":
        raise DataError(f"expected numbers, received values of type {column.dtype}.", column=name)
    return values


def _narrow(values: Array) -> Array:
    return values.astype(np.float32) if values.dtype == np.float64 else values
