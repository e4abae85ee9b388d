"""The model's columns of a shard, by name: arrays as views, columns of frames as Arrow has them.

Only reads; values are checked and cast by `kindler.data.columns`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import pyarrow as pa

from kindler.data.columns import Array
from kindler.data.shards import frames, rows
from kindler.data.shards.array_columns import columns_of
from kindler.data.shards.codec import Packed, column_to_array
from kindler.errors import DataError

Values: TypeAlias = "Array | pa.ChunkedArray"

_PIECE_BYTES = 8 << 20


def values(packed: Packed, names: Sequence[str], schema: pa.Schema | None) -> dict[str, Values]:
    """Some columns of a shard.

    Args:
        packed: The shard, or rows of it.
        names: The columns.
        schema: The plain schema of those columns over all shards, where they are frames; None for arrays.
    """
    if schema is not None:
        table = frames.conform(frames.plain(packed, names), schema)
        return {name: table.column(name) for name in names}
    known = {column.name: column for column in columns_of(packed.info)}
    missing = [name for name in names if name not in known]
    if missing:
        raise DataError(f"is not in this shard, which has {list(known)}.", column=missing[0])
    wanted = [known[name] for name in names]
    return {c.name: column_to_array(packed, c.stored, c.dtype, c.shape) for c in wanted}


def pieces(packed: Packed, start: int, stop: int, *, multiple_of: int = 1) -> Iterator[tuple[int, Packed]]:
    """The rows [start, stop) in pieces of a few megabytes, each with the number of its first row.

    Args:
        packed: A shard that is a table.
        start: The first row.
        stop: The last one + 1.
        multiple_of: What the rows of every piece but the last are a multiple of.
    """
    width = packed.table.nbytes // max(packed.info.rows, 1)
    step = -(-max(_PIECE_BYTES // max(width, 1), 1) // multiple_of) * multiple_of
    for first in range(start, stop, step):
        yield first, rows.cut(packed, first, min(first + step, stop))
