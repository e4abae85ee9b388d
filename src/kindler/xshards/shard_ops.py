"""Operations on one shard. Module-level functions with plain arguments, as they are sent to workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from kindler.data.columns import Array
from kindler.data.shards import frames, pytree
from kindler.data.shards.codec import Packed, cut, pack, taken, unpack
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
    """Pieces by row numbers (see `pytree.overlaps`); every new shard gets one, possibly empty."""
    if number == 0:
        yield from ((target, cut(packed, 0, 0)) for target in empty)
    for target, start, stop in pieces[number]:
        yield target, cut(packed, start, stop)


def cut_by_hash(
    columns: Sequence[str], schema: pa.Schema, count: int, number: int, packed: Packed
) -> Iterable[tuple[int, Packed]]:
    table = frames.conform(frames.plain(packed, columns), schema)
    targets = frames.row_hashes(table) % np.uint64(count)
    order = np.argsort(targets, kind="stable")
    edges = np.searchsorted(targets[order], np.arange(count + 1, dtype=np.uint64))
    for target in range(count):
        chosen = order[edges[target] : edges[target + 1]]
        if len(chosen) or number == 0:
            yield target, taken(packed, chosen)


def cut_to_lists(targets: Sequence[int], number: int, packed: Packed) -> Iterable[tuple[int, Packed]]:
    yield targets[number], pack([_Whole(unpack(packed))])


@dataclass(frozen=True)
class _Whole:
    """Hides an object from the codec."""

    thing: Any


def on_object(function: Callable[[int, Any], Any], number: int, packed: Packed) -> Packed:
    """A function of a shard's number and its object, as one of packed shards."""
    return pack(function(number, unpack(packed)))


def opened(number: int, wholes: list[_Whole]) -> list[Any]:
    return [whole.thing for whole in wholes]


def as_frame(number: int, thing: Any, columns: Sequence[str] = (), what: str = "") -> Any:
    if not pytree.is_frame(thing):
        raise DataError(
            f"expected pandas DataFrames; shard {number} is a {type(thing).__name__}.\n"
            "Hint: transform_shard can convert the shards."
        )
    frames.check_columns(columns, list(thing.columns), what)
    return thing


def picked(key: Any, number: int, thing: Any) -> Any:
    if not pytree.is_frame(thing) and type(thing) is not dict:
        raise ConfigError(
            f"shards[{key!r}] needs shards that are pandas DataFrames or dicts; shard {number} is a"
            f" {type(thing).__name__}."
        )
    missing = [k for k in (key if isinstance(key, list) else [key]) if k not in thing]
    if missing:
        raise ConfigError(f"no {missing[0]!r} in shard {number}; available: {list(thing)}.")
    return thing[key]


def sampled(counts: Sequence[int], seed: int, replace: bool, number: int, packed: Packed) -> Packed:
    random = np.random.default_rng([seed, number])
    return taken(packed, random.choice(packed.info.rows, counts[number], replace=replace))


def first_rows(counts: Sequence[int], number: int, packed: Packed) -> Packed:
    return cut(packed, 0, counts[number])


def maximum(column: str, number: int, thing: Any) -> list[Any]:
    present = as_frame(number, thing, [column], "max_values")[column].dropna()
    return [present.max()] if len(present) else []


def unique_values(number: int, series: Any) -> Any:
    import pandas as pd

    if not pytree.is_series(series):
        raise DataError(
            f"unique: expected pandas Series; shard {number} is a {type(series).__name__}.\n"
            "Hint: choose a column first, as in shards['a'].unique()."
        )
    if isinstance(series.dtype, pd.CategoricalDtype):
        series = series.astype(series.cat.categories.dtype)
    return series.drop_duplicates()


def assembled(features: Sequence[str], labels: Sequence[str], number: int, thing: Any) -> dict[str, Array]:
    frame = as_frame(number, thing, [*features, *labels], "assemble_feature_label_cols")
    return {"x": _matrix(frame, features), "y": _matrix(frame, labels)}


def stacked(number: int, pairs: Any) -> dict[str, Array]:
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
    return {"x": x, "y": y}


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
