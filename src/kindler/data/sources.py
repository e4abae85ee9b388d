"""Data as a value that travels to the workers, each of which opens its own rows as a spool."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from kindler.data.arrays import kind, named, values
from kindler.data.batches import ahead
from kindler.data.column_options import ColumnOptions
from kindler.data.columns import ColumnPlan
from kindler.data.parquet import ParquetFiles, scan, schema
from kindler.data.row_order import RowAssignment
from kindler.data.spool import Spool, SpoolWriter, fresh_folder, shared_spool
from kindler.errors import ConfigError, DataError
from kindler.group import Group

ROW_BITS = 33  # as in Spark's monotonically_increasing_id

_CHUNK_BYTES = 8 << 20
_SCAN_AHEAD = 4
_VAST_BYTES, _GROUPS_PER_LANE = 8 << 30, 8


class Source(Protocol):
    """Rows for a gang of workers. Picklable; every row belongs to exactly one rank.

    `kindler.testing.sources` tests each promise.
    """

    @property
    def columns(self) -> ColumnPlan:
        """The columns that are read."""

    def open(self, worker: Group, assignment: RowAssignment, *, in_order: bool = False) -> Spool:
        """Open the rows of `worker`. All workers call this together, and may exchange messages in it.

        The spool's lanes record how rows were assigned. Without lanes, each worker's rows form one lane, and
        the order of an epoch depends on the number of workers. Files go below the worker's scratch folder,
        which is removed after the run. With `in_order`, the spool must have row numbers, because rows are
        used in that order.
        """


@dataclass(frozen=True, slots=True)
class ParquetSource:
    """Every host reads all files, or, if they are vast, only its workers' row groups."""

    files: ParquetFiles
    columns: ColumnPlan
    within: tuple[int, int] | None = None  # only these rows, from the first to before the last

    def open(self, worker: Group, assignment: RowAssignment, *, in_order: bool = False) -> Spool:
        if self._is_vast(assignment):
            if self.within is not None:
                raise ConfigError(
                    "validation_split: these files are too large to be split by rows.\n"
                    "Hint: pass validation_data=..., some of the files."
                )
            return self._own_groups(worker, assignment)
        first, last = self.within or (0, self.files.rows)
        rows = last - first
        whole = shared_spool(
            worker,
            self.columns.all,
            rows,
            lambda writer, start, stop: self._write(writer, first + start, first + stop),
        )
        return self._located(whole.assigned(*assignment.of_rank(rows, worker.rank, worker.size)))

    def _is_vast(self, assignment: RowAssignment) -> bool:
        """Depends on the data alone, so that the order of rows does too."""
        groups = sum(map(len, self.files.row_groups))
        return self.files.nbytes >= _VAST_BYTES and groups >= _GROUPS_PER_LANE * assignment.base

    def _own_groups(self, worker: Group, assignment: RowAssignment) -> Spool:
        """Deals whole row groups, and their rows among the lanes that belong together."""
        sizes = [rows for groups in self.files.row_groups for rows in groups]
        starts = np.cumsum([0, *sizes])
        numbers, lanes = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        joined = assignment.lanes_for(self.files.rows)
        with SpoolWriter(fresh_folder(worker.scratch), self.columns.all) as writer:
            for group, lane in enumerate(assignment.of_groups(sizes)):
                assigned = assignment.within_group(group, int(lane), sizes[group]) % joined
                mine = assigned % worker.size == worker.rank
                if mine.any():
                    first, last = int(starts[group]), int(starts[group + 1])
                    self._write(writer, first, last, None if mine.all() else mine)
                    numbers.append(first + np.flatnonzero(mine))
                    lanes.append(assigned[mine])
        spool = writer.close()
        return self._located(spool.assigned(np.concatenate(numbers), np.concatenate(lanes), only_own=True))

    def _located(self, spool: Spool) -> Spool:
        numbers = spool.numbers
        if numbers is not None:
            first = 0 if self.within is None else self.within[0]
            spool.locate = lambda place: self.files.locate(first + int(numbers[place]))
        return spool

    def _write(
        self, writer: SpoolWriter, start: int, stop: int, only: np.ndarray[Any, Any] | None = None
    ) -> None:
        batches = scan(self.files, self.columns.names, start, stop)
        # One thread decodes while this one checks and writes.
        with contextlib.closing(ahead(batches, depth=_SCAN_AHEAD, name="kindler-scan")) as decoded:
            for batch in decoded:
                places = np.arange(start, start + len(batch))
                start += len(batch)
                if only is not None:
                    kept, only = only[: len(batch)], only[len(batch) :]
                    places, batch = places[kept], batch.filter(pa.array(kept))
                writer.append(batch, lambda i, places=places: self.files.locate(int(places[i])))  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A spool that the driver wrote, mapped whole by workers on the same machine."""

    folder: str
    columns: ColumnPlan

    def open(self, worker: Group, assignment: RowAssignment, *, in_order: bool = False) -> Spool:
        whole = Spool.open(self.folder)
        return whole.assigned(*assignment.of_rank(whole.rows, worker.rank, worker.size))


@dataclass(frozen=True, slots=True)
class DeliveredSource:
    """Rows assigned by others, in a spool of this name. The lower `ROW_BITS` bits of an id are the row's
    place in its partition, the bits above the partition."""

    columns: ColumnPlan
    name: str

    def open(self, worker: Group, assignment: RowAssignment, *, in_order: bool = False) -> Spool:
        spool = Spool.open(worker.scratch / self.name)
        ids = np.empty(0, np.int64) if spool.numbers is None else spool.numbers
        spool.numbers = _numbers(worker, ids) if in_order else None
        spool.locate = lambda place: describe_row_id(int(ids[place]))
        return spool


def describe_row_id(row_id: int) -> str:
    return f"{row_id & ((1 << ROW_BITS) - 1)} of partition {row_id >> ROW_BITS}"


def _numbers(worker: Group, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Global row numbers; workers exchange the partition lengths they know."""
    partitions, places = ids >> ROW_BITS, ids & ((1 << ROW_BITS) - 1)
    lengths = np.zeros(int(partitions.max(initial=-1)) + 1, np.int64)
    np.maximum.at(lengths, partitions, places + 1)
    gathered = [np.frombuffer(part, np.int64) for part in worker.all_gather(lengths.tobytes())]
    longest = np.zeros(max(len(part) for part in gathered) + 1, np.int64)
    for part in gathered:
        longest[1 : len(part) + 1] = np.maximum(longest[1 : len(part) + 1], part)
    numbers: np.ndarray[Any, Any] = np.cumsum(longest)[partitions] + places
    return numbers


def parquet_source(files: ParquetFiles, options: ColumnOptions | None = None) -> ParquetSource:
    merged = schema(files)
    columns = (options or ColumnOptions()).plan(dict(zip(merged.names, merged.types, strict=True)))
    schema(files, columns.names)
    return ParquetSource(files, columns)


def arrow_source(data: Any, options: ColumnOptions | None = None, *, scratch: Path) -> FolderSource:
    """If the options leave it open, the form of the data may decide on features and labels."""
    return spooled(*columns_in_memory(data, options or ColumnOptions()), scratch=scratch)


def spooled(columns: ColumnPlan, arrays: Mapping[str, Any], rows: int, *, scratch: Path) -> FolderSource:
    folder = fresh_folder(scratch)
    try:
        _write(folder, columns, arrays, rows)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return FolderSource(str(folder), columns)


def columns_in_memory(data: Any, asked: ColumnOptions) -> tuple[ColumnPlan, dict[str, Any], int]:
    found = named(data).called(asked.features, asked.labels)
    asked = asked.or_implied(found.features, found.labels)
    columns = asked.plan(found.types)
    arrays = {name: values(found.columns[name], name) for name in columns.names}
    if asked.ragged is not None:
        arrays = {name: _texts_as_arrow(array) for name, array in arrays.items()}
        columns = asked.plan(
            {name: getattr(arrays.get(name), "type", kind) for name, kind in found.types.items()}
        )
    rows = _one_length({name: len(array) for name, array in arrays.items()})
    if not rows:
        raise DataError(f"{kind(data)} has no rows.")
    return columns, arrays, rows


def _write(folder: Path, columns: ColumnPlan, arrays: Mapping[str, Any], rows: int) -> None:
    """Writes in chunks, so that a cast never holds a full second copy."""
    widest = max(int(array.nbytes) // rows for array in arrays.values())
    step = max(_CHUNK_BYTES // max(widest, 1), 1)
    with SpoolWriter(folder, columns.all, rows=rows) as writer:
        for start in range(0, rows, step):
            writer.append_arrays({name: array[start : start + step] for name, array in arrays.items()})


def _texts_as_arrow(array: Any) -> Any:
    text = isinstance(array, np.ndarray) and array.dtype.kind in "US"
    return pa.array(array.tolist()) if text else array


def _one_length(lengths: Mapping[str, int]) -> int:
    first = next(iter(lengths))
    for name, length in lengths.items():
        if length != lengths[first]:
            raise ConfigError(
                f"columns {first!r} and {name!r} have different lengths: {lengths[first]} and {length}."
            )
    return lengths[first]
