"""Nested containers of things with rows: arrays, pandas objects, plain lists. Only exact `dict`, `list`
and `tuple` are containers: subclasses may not be constructible from parts."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kindler.errors import ConfigError, DataError


def is_frame(thing: Any) -> bool:
    """Does not import pandas: without it nobody can pass a frame."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(thing, pandas.DataFrame)


def is_series(thing: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(thing, pandas.Series)


def rows(thing: Any) -> int | None:
    """Number of rows, or None if the object has none.

    >>> rows({"x": np.zeros((3, 2)), "y": (np.zeros(3),)}), rows(["a", "b"]), rows({"name": "a"})
    (3, 2, None)
    """
    found = {length for _, length in lengths(thing)}
    if len(found) == 1 and None not in found:
        return found.pop()
    return len(thing) if type(thing) is list else None


def lengths(thing: Any, path: str = "") -> Iterator[tuple[str, int | None]]:
    if type(thing) is dict:
        for key, part in thing.items():
            yield from lengths(part, f"{path}[{key!r}]")
    elif type(thing) in (list, tuple):
        for position, part in enumerate(thing):
            yield from lengths(part, f"{path}[{position}]")
    else:
        yield path, _length(thing)


def cut(thing: Any, start: int, stop: int) -> Any:
    if type(thing) is list and not _is_nest(thing):
        return thing[start:stop]
    if type(thing) is dict:
        return {key: cut(part, start, stop) for key, part in thing.items()}
    if type(thing) in (list, tuple):
        return type(thing)(cut(part, start, stop) for part in thing)
    return thing.iloc[start:stop] if is_frame(thing) or is_series(thing) else thing[start:stop]


def joined(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        kinds = sorted({type(part).__name__ for part in parts})
        raise DataError(f"shards of different kinds cannot be combined: {', '.join(kinds)}.")
    if type(first) is list and not all(_is_nest(part) for part in parts):
        return [item for part in parts for item in part]
    if type(first) is dict:
        _same_shape([tuple(part) for part in parts])
        return {key: joined([part[key] for part in parts]) for key in first}
    if type(first) in (list, tuple):
        _same_shape([len(part) for part in parts])
        return type(first)(joined([part[i] for part in parts]) for i in range(len(first)))
    if is_frame(first) or is_series(first):
        return _joined_pandas(parts)
    try:
        return np.concatenate(parts)
    except ValueError as exc:
        raise DataError(f"arrays of different shards cannot be combined: {exc}") from exc


def even_bounds(count: int, parts: int) -> list[tuple[int, int]]:
    """Bounds of nearly equal parts; the first ones are longer, as with numpy.

    >>> even_bounds(5, 3)
    [(0, 2), (2, 4), (4, 5)]
    """
    if parts < 1:
        raise ConfigError(f"the number of shards must be at least 1, received {parts}.")
    short, longer = divmod(count, parts)
    edges = [i * short + min(i, longer) for i in range(parts + 1)]
    return list(itertools.pairwise(edges))


def overlaps(sizes: Sequence[int], bounds: Sequence[tuple[int, int]]) -> list[list[tuple[int, int, int]]]:
    """Pieces of each shard, as (new shard, first row, last row + 1).

    `bounds` are the row ranges of the new shards, counted over all shards.

    >>> overlaps([3, 2], [(0, 1), (1, 5)])
    [[(0, 0, 1), (1, 1, 3)], [(1, 0, 2)]]
    """
    pieces: list[list[tuple[int, int, int]]] = []
    first = 0
    for size in sizes:
        last = first + size
        pieces.append(
            [
                (target, max(start, first) - first, min(stop, last) - first)
                for target, (start, stop) in enumerate(bounds)
                if start < last and stop > first
            ]
        )
        first = last
    return pieces


def shares(sizes: Sequence[int], frac: float) -> list[int]:
    """Rows of each shard in a sample of `frac` of all rows, to the nearest row.

    >>> shares([3, 3, 4], 0.5)
    [2, 1, 2]
    """
    edges = np.concatenate([[0], np.cumsum(sizes)])
    wanted = np.floor(edges * frac + 0.5).astype(int)
    return [int(n) for n in np.diff(wanted)]


def _length(thing: Any) -> int | None:
    if isinstance(thing, np.ndarray):
        return len(thing) if thing.ndim else None
    return len(thing) if is_frame(thing) or is_series(thing) else None


def _is_nest(thing: list[Any]) -> bool:
    """Whether a list holds things with equally many rows, rather than being the rows."""
    found = {length for _, length in lengths(thing)}
    return len(found) == 1 and None not in found


def _same_shape(shapes: Sequence[Any]) -> None:
    for shape in shapes:
        if shape != shapes[0]:
            raise DataError(f"shards of different structure cannot be combined: {shapes[0]} and {shape}.")


def _joined_pandas(parts: Sequence[Any]) -> Any:
    import pandas as pd

    parts = [part for part in parts if len(part)] or parts[:1]  # without rows, a dtype says nothing
    whole = pd.concat(parts)
    if is_series(parts[0]):
        return _one_category(whole, parts)
    for position, name in enumerate(parts[0].columns):
        if str(whole.dtypes.iloc[position]) == "object" and all(name in part for part in parts):
            columns = [part.iloc[:, list(part.columns).index(name)] for part in parts]
            whole.isetitem(position, _one_category(whole.iloc[:, position], columns))
    return whole


def _one_category(whole: Any, parts: Sequence[Any]) -> Any:
    """Unite categories: pandas drops the categorical dtype where they differ."""
    import pandas as pd
    from pandas.api.types import union_categoricals

    if not all(isinstance(part.dtype, pd.CategoricalDtype) for part in parts):
        return whole
    if isinstance(whole.dtype, pd.CategoricalDtype) or any(part.dtype.ordered for part in parts):
        return whole
    return pd.Series(union_categoricals(list(parts)), index=whole.index, name=whole.name)
