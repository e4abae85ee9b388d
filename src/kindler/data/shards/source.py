"""Shards that lie in files of this machine as the rows of a run: each worker opens its own range of them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from kindler.data.columns import Array, Column, Columns, Where, conform
from kindler.data.parquet import share
from kindler.data.shards import rows
from kindler.data.shards.codec import Info, Packed, read
from kindler.data.shards.reading import Values, pieces, values
from kindler.data.shards.store import shard_path
from kindler.data.spool import Spool, SpoolWriter

__all__ = ["ShardSource"]


@dataclass(frozen=True, kw_only=True)
class ShardSource:
    """Rows of shards; see `kindler.data.sources.Source`.

    A rank's rows are written to its spool, a few megabytes at a time. Where they all lie in one file, arrays
    of the right dtype are used where they are instead.

    Attributes:
        folder: Where the files are.
        infos: What each shard is.
        columns: What is read of each row.
        schema: The plain schema of those columns, where the shards are frames; None for arrays.
        keeper: Whoever must live as long as the files are needed. Does not travel.
    """

    folder: str
    infos: tuple[Info, ...]
    columns: Columns
    schema: pa.Schema | None = None
    keeper: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "keeper": None}

    def open(self, rank: int, size: int, scratch: Path) -> Spool:
        sizes = [info.rows for info in self.infos]
        mine = rows.overlaps(sizes, [share(sum(sizes), size, rank)])
        ranges = [
            (shard, start, stop)
            for shard, found in enumerate(mine)
            for _, start, stop in found
            if stop > start
        ]
        ready = self._in_place(*ranges[0]) if len(ranges) == 1 else {}
        others = [column for column in self.columns.all if column.name not in ready]
        if not others:
            return Spool(rows=len(next(iter(ready.values()))), arrays=ready)
        written = self._written(ranges, others, scratch)
        return Spool(rows=written.rows, arrays={**ready, **written.arrays}) if ready else written

    def close(self) -> None:
        """The files belong to the collection."""

    def _in_place(self, shard: int, start: int, stop: int) -> dict[str, Array]:
        """The columns that need no change, as they lie in the file."""
        if self.schema is not None:
            return {}
        packed = rows.cut(self._read(shard), start, stop)
        where = _named(shard, start)
        found = {}
        for column in self.columns.all:
            array = values(packed, [column.name], None)[column.name]
            # Only what has the right dtype already is checked as a whole: a cast would hold a copy of it.
            if conform(array[:0], column, where=where).dtype == array.dtype:
                found[column.name] = conform(array, column, where=where)
                found[column.name].flags.writeable = False
        return found

    def _written(
        self, ranges: Sequence[tuple[int, int, int]], columns: Sequence[Column], scratch: Path
    ) -> Spool:
        names = [column.name for column in columns]
        count = sum(stop - start for _, start, stop in ranges)
        scratch.mkdir(parents=True, exist_ok=True)
        with SpoolWriter(tempfile.mkdtemp(prefix="spool-", dir=scratch), columns, rows=count) as writer:
            for shard, start, stop in ranges:
                for first, piece in pieces(self._read(shard), start, stop):
                    taken: dict[str, Values] = values(piece, names, self.schema)
                    writer.append_arrays(taken, _named(shard, first))
        return writer.close()

    def _read(self, shard: int) -> Packed:
        return read(self.infos[shard], shard_path(self.folder, shard))


def _named(shard: int, first: int) -> Where:
    return lambda i: f"{first + i} of shard {shard}"
