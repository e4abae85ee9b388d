"""Shards that lie in files of this machine as the rows of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from kindler.data.columns import Array, Column, Columns, Where, conform
from kindler.data.row_order import Dealing
from kindler.data.shards import rows
from kindler.data.shards.codec import Info, Packed, read
from kindler.data.shards.reading import Values, pieces, values
from kindler.data.shards.shard_files import shard_path
from kindler.data.shared_spool import Member, shared_spool
from kindler.data.spool import Spool, SpoolWriter


@dataclass(frozen=True, kw_only=True)
class ShardSource:
    """Rows of shards; see `kindler.data.sources.Source`.

    Rows are written to one spool, a few megabytes at a time. Where they all lie in one file, arrays of the
    right dtype are used where they are instead.

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

    def open(self, worker: Member, dealing: Dealing, *, in_order: bool = False) -> Spool:
        whole = self._whole(worker)
        return whole.dealt(*dealing.of_rank(whole.rows, worker.rank, worker.size))

    def _whole(self, worker: Member) -> Spool:
        filled = [shard for shard, info in enumerate(self.infos) if info.rows]
        count = sum(info.rows for info in self.infos)
        ready = self._in_place(filled[0]) if len(filled) == 1 else {}
        others = [column for column in self.columns.all if column.name not in ready]
        if not others:
            return Spool(rows=count, arrays=ready)
        written = shared_spool(
            worker, others, count, lambda writer, start, stop: self._write(writer, others, start, stop)
        )
        return Spool(rows=count, arrays={**ready, **written.arrays}) if ready else written

    def _in_place(self, shard: int) -> dict[str, Array]:
        """The columns that need no change, as they lie in the file of the only shard that has rows."""
        if self.schema is not None:
            return {}
        packed, where = self._read(shard), _named(shard, 0)
        found = {}
        for column in self.columns.all:
            if column.ragged:
                continue
            array = values(packed, [column.name], None)[column.name]
            # Only what has the right dtype already is checked as a whole: a cast would hold a copy of it.
            if conform(array[:0], column, where=where).dtype == array.dtype:
                found[column.name] = conform(array, column, where=where)
                found[column.name].flags.writeable = False
        return found

    def _write(self, writer: SpoolWriter, columns: Sequence[Column], start: int, stop: int) -> None:
        names = [column.name for column in columns]
        overlaps = rows.overlaps([info.rows for info in self.infos], [(start, stop)])
        for shard, found in enumerate(overlaps):
            for _, low, high in found:
                if low < high:
                    for first, piece in pieces(self._read(shard), low, high):
                        taken: dict[str, Values] = values(piece, names, self.schema)
                        writer.append_arrays(taken, _named(shard, first))

    def _read(self, shard: int) -> Packed:
        return read(self.infos[shard], shard_path(self.folder, shard))


def _named(shard: int, first: int) -> Where:
    return lambda i: f"{first + i} of shard {shard}"
