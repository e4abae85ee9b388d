"""Shards as the rows of a run: their named columns, and local shard files as a source.

Arrays become flat, named columns:

    shard                       columns
    {"x": a, "y": b}            x, y
    {"x": (a, b), "y": c}       x0, x1, y            (lists too)
    {"x": {"p": a}, "y": b}     p, y
    (a, b)                      x, y
    a                           x
    {"p": a, "q": b}            p, q                 (neither inputs nor targets until an option says so)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from kindler.data.columns import Array, Column, ColumnPlan, Where, conform
from kindler.data.row_order import RowAssignment
from kindler.data.shards import frames
from kindler.data.shards.backend import shard_path
from kindler.data.shards.codec import Info, Packed, column_to_array, cut, leaves, read
from kindler.data.spool import Spool, SpoolWriter, shared_spool
from kindler.errors import DataError
from kindler.group import Group

_ROLES: dict[str, Literal["feature", "label"]] = {"x": "feature", "y": "label"}


@dataclass(frozen=True, slots=True)
class ArrayColumn:
    name: str
    role: Literal["feature", "label"] | None
    stored: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{np.dtype(self.dtype).name} of shape {self.shape}"


def array_columns(infos: Mapping[int, Info]) -> list[ArrayColumn]:
    """The columns of shards of arrays, by number; raises DataError if they differ."""
    first, known = next((number, columns_of(info)) for number, info in infos.items())
    wanted = {column.name: str(column) for column in known}
    for number, info in infos.items():
        present = {column.name: str(column) for column in columns_of(info)}
        for name in [*wanted, *present]:
            here, there = present.get(name, "none"), wanted.get(name, "none")
            if here != there:
                raise DataError(f"shard {number} has {here}, and shard {first} has {there}.", column=name)
    return known


def columns_of(info: Info) -> list[ArrayColumn]:
    """Empty unless the shard holds arrays."""
    return [_column(*leaf) for leaf in leaves(info.schema)] if info.kind == "arrays" else []


def _column(path: tuple[Any, ...], stored: str, dtype: str, shape: tuple[int, ...]) -> ArrayColumn:
    head: Any = path[0] if path else 0
    rest = path[1:]
    if isinstance(head, int):  # a tuple of inputs and targets, or an array alone
        head = ("x", "y")[head] if head < 2 else f"z{head}"
    role = _ROLES.get(head)
    keys = [i for i, part in enumerate(rest) if isinstance(part, str)]
    if keys:
        head, rest = rest[keys[-1]], rest[keys[-1] + 1 :]
    numbers = "_".join(map(str, rest))
    name = f"{head}_{numbers}" if keys and rest else f"{head}{numbers}"
    return ArrayColumn(name, role, stored, dtype, shape)


Values: TypeAlias = "Array | pa.ChunkedArray"

_PIECE_BYTES = 8 << 20


def values(packed: Packed, names: Sequence[str], schema: pa.Schema | None) -> dict[str, Values]:
    """Views for arrays, Arrow for frames; `schema` is the plain schema over all frames, None for arrays."""
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
    width = packed.table.nbytes // max(packed.info.rows, 1)
    step = -(-max(_PIECE_BYTES // max(width, 1), 1) // multiple_of) * multiple_of
    for first in range(start, stop, step):
        yield first, cut(packed, first, min(first + step, stop))


@dataclass(frozen=True, kw_only=True)
class ShardSource:
    """Rows of shards. If all lie in one file, arrays of the right dtype are used in place. `schema` is
    None for arrays; `keeper` keeps the files alive and is not pickled."""

    folder: str
    infos: tuple[Info, ...]
    columns: ColumnPlan
    schema: pa.Schema | None = None
    keeper: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "keeper": None}

    def open(self, worker: Group, assignment: RowAssignment, *, in_order: bool = False) -> Spool:
        whole = self._whole(worker)
        return whole.assigned(*assignment.of_rank(whole.rows, worker.rank, worker.size))

    def _whole(self, worker: Group) -> Spool:
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
        for shard, info in enumerate(self.infos):
            low, high = max(start, 0), min(stop, info.rows)
            if low < high:
                for first, piece in pieces(self._read(shard), low, high):
                    writer.append_arrays(values(piece, names, self.schema), _named(shard, first))
            start, stop = start - info.rows, stop - info.rows

    def _read(self, shard: int) -> Packed:
        return read(self.infos[shard], shard_path(self.folder, shard))


def _named(shard: int, first: int) -> Where:
    return lambda i: f"{first + i} of shard {shard}"
