"""Pure operations on the rows of packed shards: cut, take, join, hash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from kindler.data.columns import Array
from kindler.data.shards import pytree
from kindler.data.shards.codec import META, Packed, from_table, pack, unpack
from kindler.errors import DataError

_NULL_HASH = np.uint64(0x9E3779B97F4A7C15)
_WHOLE = (
    pa.types.is_integer, pa.types.is_boolean, pa.types.is_timestamp, pa.types.is_duration, pa.types.is_time64
)  # fmt: skip
_MIX = np.uint64(0x100000001B3)


def cut(packed: Packed, start: int, stop: int) -> Packed:
    if packed.is_table:
        return _again(packed, packed.table.slice(start, stop - start))
    return pack(pytree.cut(unpack(packed), start, stop))


def taken(packed: Packed, positions: Array) -> Packed:
    if packed.is_table:
        return _again(packed, packed.table.take(pa.array(positions)))
    thing = unpack(packed)
    picked = [pytree.cut(thing, int(i), int(i) + 1) for i in positions]
    return pack(pytree.joined(picked) if picked else pytree.cut(thing, 0, 0))


def joined(parts: Sequence[Packed]) -> Packed:
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    if first.is_table and all(_alike(first, part) for part in parts):
        return _again(first, pa.concat_tables([part.table for part in parts]))
    things = [unpack(part) for part in parts if part.info.rows] or [unpack(first)]
    return pack(pytree.joined(things) if len(things) > 1 else things[0])


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


def column_hashes(columns: Sequence[pa.ChunkedArray]) -> Array:
    """Hash each row by its values alone, identically in every process. Columns must be of plain types (see
    `frames`), the same for every shard."""
    total = np.zeros(len(columns[0]), np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            total = total * _MIX + _hashes(column)
    return total


def _hashes(column: pa.ChunkedArray) -> Array:
    from pandas.util import hash_array

    kind = column.type
    neutral: Any
    if pa.types.is_floating(kind):
        column, neutral = column.cast(pa.float64()), 0.0
    elif any(is_kind(kind) for is_kind in _WHOLE):
        column, neutral = column.cast(pa.int64()), 0
    elif pa.types.is_binary(kind):
        cells = [None if cell is None else cell.hex() for cell in column.to_pylist()]
        column, neutral = pa.chunked_array([pa.array(cells, pa.string())]), ""
    else:
        try:
            column, neutral = column.cast(pa.string()), ""
        except pa.ArrowNotImplementedError as exc:
            raise DataError(f"values of type {kind} cannot say which shard a row belongs to.") from exc
    missing = column.is_null().to_numpy()
    values = column.fill_null(neutral).to_numpy()
    if values.dtype == np.float64:
        values = values + 0.0  # so that -0.0 is 0.0
    found: Array = hash_array(values)
    return np.where(missing, _NULL_HASH, found)


def _again(packed: Packed, table: pa.Table) -> Packed:
    made = from_table(table, packed.info.kind)
    return Packed(made.info, table, memory=packed.memory)


def _alike(one: Packed, other: Packed) -> bool:
    if not other.is_table or one.info.kind != other.info.kind:
        return False
    a, b = one.table.schema, other.table.schema
    return bool(a.equals(b)) and _note(a) == _note(b)


def _note(schema: Any) -> Any:
    metadata = schema.metadata or {}
    return metadata.get(META), metadata.get(b"pandas")
