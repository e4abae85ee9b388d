"""A worker's rows on disk: one raw file a column, memory-mapped and used again in every epoch.

One file a column (not one Arrow file for all) because shuffled batches are gathers, and a gather
wants its column as one contiguous array. It is page cache, not heap, so it may be bigger than memory.

    spool.json      written last, so a spool without it is not whole: {"rows", "columns", ...}
    000.bin, ...    the values of column 0, ... in C order
    000.offsets.bin int64: where each row of column 0 begins and the last one ends; only where rows differ
                    in length (`ragged.py`)
    order.bin       int64 positions, only when rows did not arrive in their order
    numbers.bin     int64 ids of the rows and
    lanes.bin       int32 lanes of them, in their order; only where rows came with both

Growing files are written, not mapped: it is faster (0.05 against 0.08 s for 188 MB), and a full disk is an
OSError instead of a SIGBUS.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeAlias

import numpy as np
import pyarrow as pa

from kindler.data.columns import Array, Column, Where
from kindler.data.ragged import Ragged, read_column
from kindler.errors import DataError, naming_full_disk
from kindler.group import Group

Layout: TypeAlias = dict[str, list[Any]]
"""Column name -> [dtype name or None, shape of a row or None]; None where no row said.

The shape of rows that differ in length begins with None; text and bytes have the dtypes "str" and "bytes"."""

_MANIFEST = "spool.json"
_ORDER, _NUMBERS, _LANES = "order.bin", "numbers.bin", "lanes.bin"
_MARK_ROWS, _MARK_ROWS_MIN, _MARK_ROWS_LEAST, _MARK_BYTES = 4096, 64, 8, 16 << 20
_MARK_DIGITS = 16
_BUFFER_BYTES = 1 << 17


@dataclass(kw_only=True, eq=False)
class Spool:
    """Rows as read-only views of mapped files; copy what is handed to code that may write.

    Row `i` is `arrays[name][i]`, or `arrays[name][order[i]]` if there is an order (arrays may then be longer
    than `rows`). `numbers` (places among all workers' rows) and `lanes` follow this natural order, and are
    None if unknown. `locate` names a row for error messages.
    """

    rows: int
    arrays: dict[str, Any]
    order: Array | None = None
    numbers: Array | None = None
    lanes: Array | None = None
    locate: Callable[[int], int | str] | None = None
    layout: Layout = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = self.layout or {name: _entry(array) for name, array in self.arrays.items()}

    @staticmethod
    def open(folder: str | os.PathLike[str]) -> Spool:
        folder = Path(folder)
        try:
            manifest = json.loads((folder / _MANIFEST).read_text())
        except FileNotFoundError as exc:
            raise DataError(f"{folder} is not a finished spool: {_MANIFEST} is missing.") from exc
        rows = int(manifest["rows"])
        layout: Layout = {c["name"]: [c["dtype"], c["shape"]] for c in manifest["columns"]}
        with ExitStack() as stack:

            def files(entry: Mapping[str, Any], *keys: str) -> list[BinaryIO]:
                names = [entry[key] for key in keys if entry.get(key)]
                return [stack.enter_context((folder / name).open("rb")) for name in names]

            arrays = {
                column["name"]: _mapped(files(column, "file", "offsets"), rows, *layout[column["name"]])
                for column in manifest["columns"]
            }
            kinds = {"order": "int64", "numbers": "int64", "lanes": "int32"}
            of_rows: dict[str, Any] = {
                name: _mapped(files(manifest, name), rows, kind, [])
                for name, kind in kinds.items()
                if manifest.get(name)
            }
        return Spool(rows=rows, arrays=arrays, layout=layout, **of_rows)

    def assigned(self, numbers: Array, lanes: Array, *, only_own: bool = False) -> Spool:
        """Without copying; with `only_own`, this spool already holds just those rows, otherwise all."""
        order = self.order if only_own or len(numbers) == self.rows else self.positions(numbers)
        return replace(
            self,
            rows=len(numbers),
            order=order,
            numbers=numbers,
            lanes=lanes,
            locate=lambda place: int(numbers[place]),
        )

    def positions(self, rows: Array) -> Array:
        """Where rows (places in natural order) lie in the arrays."""
        return rows if self.order is None else self.order[rows]

    def taken(self, columns: Sequence[Column], rows: Array) -> dict[str, Any]:
        """Copies of these rows (places in natural order)."""
        positions = self.positions(rows)
        return {column.name: self.arrays[column.name][positions] for column in columns}

    def lane_counts(self, lanes: int) -> list[int]:
        if self.lanes is None:
            return []
        counts: list[int] = np.bincount(self.lanes, minlength=lanes).tolist()
        return counts

    def with_lanes(self, lanes: int) -> Spool:
        found = self.lanes if self.lanes is not None else np.empty(0, np.int32)
        return replace(self, lanes=found % lanes)

    def by_lane(self, otherwise: int) -> dict[int, Array]:
        """Places of each lane's rows; rows without lanes are the lane `otherwise`."""
        if self.lanes is None:
            return {otherwise: np.arange(self.rows)} if self.rows else {}
        together, counts = np.argsort(self.lanes, kind="stable"), np.bincount(self.lanes)
        pieces = np.split(together, np.cumsum(counts)[:-1])
        return {lane: rows for lane, rows in enumerate(pieces) if len(rows)}

    def fingerprint(self, rows: Array, *, parts: int = 1) -> str:
        """Hashes a sample of these rows (places in natural order); with more `parts`, fewer rows of each."""
        width = sum(array[:1].nbytes for array in self.arrays.values())
        most = max(_MARK_ROWS_MIN, min(_MARK_ROWS, _MARK_BYTES // max(1, width)))
        count = min(len(rows), max(_MARK_ROWS_LEAST, most // parts))
        some = rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)] if count else rows[:0]
        places = self.positions(some)
        digest = hashlib.sha256(str(len(rows)).encode())
        for name in sorted(self.arrays):
            taken = self.arrays[name][places]
            digest.update(
                taken.tobytes() if isinstance(taken, Ragged) else np.ascontiguousarray(taken).tobytes()
            )
        return digest.hexdigest()[:_MARK_DIGITS]

    def with_layout(self, layout: Layout) -> Spool:
        merged = agreed([layout, self.layout])
        arrays = self.arrays if self.rows else {name: _empty(*entry) for name, entry in merged.items()}
        return replace(self, arrays=arrays, layout=merged)


def agreed(layouts: Sequence[Layout]) -> Layout:
    merged: Layout = {}
    for layout in layouts:
        for name, entry in layout.items():
            known = merged.setdefault(name, [None, None])
            for i, what in enumerate(("dtype", "shape")):
                value = entry[i] if i == 0 or entry[i] is None else list(entry[i])
                if known[i] is not None and value is not None and known[i] != value:
                    raise DataError(
                        f"some rows have {what} {known[i]} and others {value}; all must be equal.",
                        column=name,
                    )
                known[i] = known[i] if value is None else value
    return merged


def _entry(array: Any) -> list[Any]:
    return array.entry if isinstance(array, Ragged) else [array.dtype.name, list(array.shape[1:])]


def _empty(dtype: str | None, shape: Sequence[int | None] | None) -> Any:
    if dtype is not None and Ragged.holds(dtype, shape):
        return Ragged.empty(dtype, shape or ())
    return np.empty((0, *(shape if shape is not None else (0,))), dtype or "float32")


def _mapped(
    files: Sequence[BinaryIO], rows: int, dtype: str | None, shape: Sequence[int | None] | None
) -> Any:
    """A column's array of one file, or its rows of different lengths of two: values and offsets."""
    if len(files) == 1:
        return _mapped_file(files[0], rows, dtype, shape) if rows else _empty(dtype, shape)
    if not rows or dtype is None or shape is None:
        return Ragged.empty(dtype or "float32", shape if shape is not None else (None,))
    bounds = _mapped_file(files[1], rows + 1, "int64", [])
    if dtype in ("str", "bytes"):
        flat = _mapped_file(files[0], int(bounds[-1]), "uint8", [])
        return Ragged(flat, bounds, kind=dtype, inner=tuple(shape))
    inner = tuple(int(size or 0) for size in shape[1:])
    return Ragged(_mapped_file(files[0], int(bounds[-1]), dtype, inner), bounds, kind=dtype, inner=inner)


def _mapped_file(file: BinaryIO, rows: int, dtype: str | None, shape: Sequence[int | None] | None) -> Array:
    want = (rows, *(int(size or 0) for size in shape or ()))
    expected = math.prod(want) * np.dtype(dtype).itemsize
    if not expected:
        return np.empty(want, dtype)
    size = os.fstat(file.fileno()).st_size
    if size != expected:  # reading past the end of a mapped file kills the process
        raise DataError(f"{file.name} has {size} bytes where {expected} were written: the spool is damaged.")
    return np.asarray(np.memmap(file, dtype=np.dtype(dtype), mode="r", shape=want))


class SpoolWriter:
    """`close()` returns the Spool; if the block raises, no manifest is written and the folder is unusable.
    `first` is the first row's place in files shared by several writers; `whole` returns their Spool."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        columns: Sequence[Column],
        *,
        rows: int | None = None,
        first: int = 0,
    ) -> None:
        self.folder = Path(folder)
        self.rows = 0
        self._columns, self._expected, self._first = columns, rows, first
        self._files: list[_ColumnFile] = []
        self._ids: list[Array] = []
        self._lanes: list[Array] = []
        self._spool: Spool | None = None

    def __enter__(self) -> SpoolWriter:
        try:
            with naming_full_disk(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                for number, column in enumerate(self._columns):
                    self._files.append(_ColumnFile(column, self.folder, number, self._first))
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self._release()

    def append(self, batch: pa.RecordBatch | pa.Table, where: Where | None = None) -> None:
        names = batch.schema.names
        missing = [file.column.name for file in self._files if file.column.name not in names]
        if missing:
            raise DataError(f"is not in the data, which has {names}.", column=missing[0])
        self.append_arrays({file.column.name: batch.column(file.column.name) for file in self._files}, where)

    def append_arrays(
        self, values: Mapping[str, Array | pa.Array | pa.ChunkedArray | Ragged], where: Where | None = None
    ) -> None:
        start = self.rows
        name_row = where or (lambda i: start + i)
        # All are checked before one is written, so that no column runs ahead of the others.
        checked = [read_column(values[file.column.name], file.column, where=name_row) for file in self._files]
        counts = {len(array) for array in checked}
        if len(counts) > 1:
            raise ValueError(f"columns of different lengths: {sorted(counts)}.")
        rows = counts.pop() if counts else 0
        if not rows:
            return
        for file, array in zip(self._files, checked, strict=True):
            file.match(array, name_row)
        for file, array in zip(self._files, checked, strict=True):
            file.write(array)
        self.rows += rows

    def append_order(self, ids: Array, lanes: Array | None = None) -> None:
        self._ids.append(np.array(ids, dtype=np.int64))
        if lanes is not None:
            self._lanes.append(np.array(lanes, dtype=np.int32))

    def close(self) -> Spool:
        if self._spool is None:
            self._release()
            self._check_count()
            with naming_full_disk(self.folder):
                self._finish(self._write_order())
            self._spool = Spool.open(self.folder)
        return self._spool

    def layout(self) -> Layout:
        self._check_count()
        return {file.column.name: file.entry for file in self._files}

    def values(self) -> list[int]:
        return [file.values for file in self._files]

    def join(self, before: Sequence[int]) -> None:
        for file, count in zip(self._files, before, strict=True):
            file.join(count)

    def whole(self, rows: int, layout: Layout) -> Spool:
        """After every writer's `flush`; mapped through open files, so the folder may disappear."""
        arrays = {f.column.name: _mapped(f.files, rows, *layout[f.column.name]) for f in self._files}
        self._spool = Spool(rows=rows, arrays=arrays, layout=layout)
        self._release()
        return self._spool

    def flush(self) -> None:
        for column in self._files:
            for file in column.files:
                file.flush()

    def _check_count(self) -> None:
        if self._expected is not None and self.rows != self._expected:
            raise DataError(
                f"{self._expected} rows were expected and {self.rows} arrived; the data changed meanwhile."
            )

    def _release(self) -> None:
        for file in self._files:
            file.close()

    def _write_order(self) -> dict[str, str | None]:
        if not self._ids:
            return {"order": None}
        ids = np.concatenate(self._ids)
        if len(ids) != self.rows:
            raise ValueError(f"{len(ids)} row ids for {self.rows} rows.")
        arrived = bool((ids[1:] >= ids[:-1]).all())
        order = None if arrived else np.argsort(ids, kind="stable").astype(np.int64, copy=False)
        written: dict[str, str | None] = {"order": None}
        if order is not None:
            (self.folder / _ORDER).write_bytes(order.data)
            written["order"] = _ORDER
        if self._lanes:
            lanes = np.concatenate(self._lanes)
            (self.folder / _NUMBERS).write_bytes((ids if order is None else ids[order]).data)
            (self.folder / _LANES).write_bytes((lanes if order is None else lanes[order]).data)
            written |= {"numbers": _NUMBERS, "lanes": _LANES}
        return written

    def _finish(self, order: Mapping[str, str | None]) -> None:
        manifest = {
            "rows": self.rows,
            "columns": [file.manifest() for file in self._files],
            **order,
        }
        beside = self.folder / f"{_MANIFEST}.part"
        beside.write_text(json.dumps(manifest, indent=1))
        os.replace(beside, self.folder / _MANIFEST)


class _ColumnFile:
    """A column's values, and the offsets of rows that differ in length. Of several writers each begins at
    its `first` row; values of rows of different lengths wait in a file of their own until `join`."""

    def __init__(self, column: Column, folder: Path, number: int, first: int) -> None:
        self.column, self._first = column, first
        shape = None if column.shape is None else list(column.shape)
        self.entry: list[Any] = [None if column.dtype is None else np.dtype(column.dtype).name, shape]
        if column.ragged:
            self.entry = [None, None]
        self.values = 0
        self._ends: list[Array] = []
        self._own: IO[bytes] | None = None
        kinds = ("file", "offsets") if column.ragged else ("file",)
        self._names = dict(zip(kinds, (f"{number:03d}.bin", f"{number:03d}.offsets.bin"), strict=False))
        self._folder = folder
        # Not "wb": it would cut off what another writer has written.
        numbers = [os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600) for name in self._names.values()]
        self.files = [open(number, "r+b", buffering=_BUFFER_BYTES) for number in numbers]  # noqa: SIM115

    def match(self, array: Any, where: Where) -> None:
        dtype, shape = _entry(array)
        if self.column.ragged and not len(array.flat) and self.entry[0] is not None:
            return  # rows without values do not say what shape their values would have
        known_dtype, known_shape = self.entry
        known = self.values or not self.column.ragged
        if known and (known_dtype not in (None, dtype) or known_shape not in (None, shape)):
            raise DataError(
                f"has {dtype} values of shape {tuple(shape)} where earlier rows have {known_dtype} of"
                f" {tuple(known_shape or ())}; all rows must have the same dtype and shape.",
                column=self.column.name,
                row=where(0),
            )
        self.entry = [dtype, shape]

    def write(self, array: Any) -> None:
        if self.column.ragged:
            rows = array.take(slice(None))
            if self._first and self._own is None:
                # Without a name, and gone when it is closed.
                self._own = tempfile.TemporaryFile(dir=self._folder, buffering=_BUFFER_BYTES)  # noqa: SIM115
            self._ends.append(rows.offsets[1:] + self.values)
            self.values += int(rows.offsets[-1])
            array = rows.flat
        elif self._first and array.nbytes:
            self.files[0].seek(self._first * (array.nbytes // len(array)))
            self._first = 0
        self._put(self._own or self.files[0], array)

    def join(self, before: int) -> None:
        """Put the rows behind the `before` values of earlier writers."""
        if not self.column.ragged:
            return
        if self._own is not None:
            width = self._own.seek(0, os.SEEK_END) // max(1, self.values)
            self._own.seek(0)
            self.files[0].seek(before * width)
            with naming_full_disk(str(self._folder)):
                shutil.copyfileobj(self._own, self.files[0], 1 << 20)
            self._own.close()
            self._own = None
        ends = np.concatenate([np.zeros(1, np.int64), *self._ends]) + before
        self.files[1].seek(8 * self._first)
        self._put(self.files[1], ends)  # the first of them is what the writer before has written last
        self._ends = []

    def close(self) -> None:
        if self.files and self._ends and self._own is None:
            self.join(0)
        if self._own is not None:
            self._own.close()
            self._own = None
        files, self.files = self.files, []
        with naming_full_disk(str(self._folder)):
            for file in files:
                file.close()

    def manifest(self) -> dict[str, Any]:
        dtype, shape = self.entry
        return {"name": self.column.name, "dtype": dtype, "shape": shape, **self._names}

    def _put(self, file: IO[bytes], array: Array) -> None:
        if array.nbytes:
            with naming_full_disk(str(self._folder / self._names["file"]), array.nbytes):
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def fresh_folder(scratch: Path) -> Path:
    with naming_full_disk(scratch):
        scratch.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="spool-", dir=scratch))


def shared_spool(
    worker: Group, columns: Sequence[Column], rows: int, write: Callable[[SpoolWriter, int, int], None]
) -> Spool:
    """One spool per host, written in parts by its workers and mapped whole by all. A collective call."""
    folder, place, count = _meet(worker)
    start, stop = place * rows // count, (place + 1) * rows // count
    with SpoolWriter(folder, columns, rows=stop - start, first=start) as writer:
        write(writer, start, stop)
        if count == 1 and worker.size == 1:
            return writer.close()
        if any(column.ragged for column in columns):
            writer.join(_values_before(worker, folder, writer.values()))
        writer.flush()
        layouts = worker.all_gather(json.dumps(writer.layout()).encode())
        return writer.whole(rows, agreed([json.loads(layout) for layout in layouts]))


def _values_before(worker: Group, folder: Path, mine: list[int]) -> list[int]:
    gathered = [json.loads(part) for part in worker.all_gather(json.dumps([str(folder), mine]).encode())]
    earlier = [counts for where, counts in gathered[: worker.rank] if where == str(folder)]
    return [sum(counts[i] for counts in earlier) for i in range(len(mine))]


def _meet(worker: Group) -> tuple[Path, int, int]:
    mine = fresh_folder(worker.scratch)
    # A worker that takes the place of a dead one finds no folder of its neighbours, who may be elsewhere.
    if worker.replaceable or (len(set(worker.hosts)) == worker.size and not worker.regroups):
        return mine, 0, 1
    here = [rank for rank, host in enumerate(worker.hosts) if host == worker.hosts[worker.rank]]
    folder = Path(worker.all_gather(str(mine).encode())[here[0]].decode())
    # Containers may have the name of a host in common, and no folder.
    seen = worker.all_gather(b"1" if _visible(folder) else b"")
    # One that takes the place of another gets the answers to that one, and may be elsewhere.
    if all(seen[rank] for rank in here) and _visible(folder):
        return folder, here.index(worker.rank), len(here)
    return mine, 0, 1


def _visible(folder: Path) -> bool:
    return os.access(folder, os.R_OK | os.W_OK | os.X_OK)
