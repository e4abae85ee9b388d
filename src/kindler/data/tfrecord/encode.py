"""Encodes RecordBatches as records, one column at a time for all rows. Every column reports its bytes per
row, which fixes the places of the records; then every column writes its bytes. If all records have the
same layout, the places are columns of a matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from kindler.data.arrays import is_local_data, kind, named, values
from kindler.data.columns import Array, Where, is_list, numbers
from kindler.data.paths import absolute
from kindler.data.tfrecord import varints
from kindler.data.tfrecord.framing import (
    AROUND,
    HEAD,
    checksum,
    length_checksums,
    masked,
    part_name,
    staged,
    written,
)
from kindler.data.tfrecord.schema import BYTES, FLOAT, INT64, kind_of, refusal
from kindler.errors import ConfigError, DataError

_SHORT_BYTES = 24
_INT64_MAX = np.iinfo(np.int64).max


def encode(batch: pa.RecordBatch, *, where: Where = int) -> Array:
    """All records, with lengths and checksums. The types must have passed `checked`."""
    rows = batch.num_rows
    if not rows:
        return np.empty(0, np.uint8)
    named_arrays = zip(batch.schema.names, batch.columns, strict=True)
    columns = [c for c in (_column(str(name), array, where) for name, array in named_arrays) if c is not None]
    size: Array = np.zeros(rows, np.int64)
    starts: list[Array] = []
    for column in columns:
        starts.append(size)
        size = size + column.sizes
    taken = varints.sizes(size)
    payload = 1 + taken + size
    whole = payload + AROUND
    records = np.cumsum(whole) - whole
    out = _Out(np.empty(int(whole.sum()), np.uint8), records, whole)
    out.words("<u8", records, payload)
    out.words("<u4", records + 8, length_checksums(payload))
    out.constant(records + HEAD, b"\x0a")
    out.varints(records + HEAD + 1, size, taken)
    base = records + HEAD + 1 + taken
    for column, start in zip(columns, starts, strict=True):
        column.write(out, base + start)
    _seal(out, records + HEAD, payload)
    return out.data


def _seal(out: _Out, starts: Array, sizes: Array) -> None:
    data, crc = out.data.tobytes(), checksum()
    pairs = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
    sums = [crc(data[start:stop]) for start, stop in pairs]
    out.words("<u4", starts + sizes, masked(np.array(sums, np.uint32)))


class _Out:
    def __init__(self, data: Array, records: Array, sizes: Array) -> None:
        self.data = data
        self._rows = len(records)
        self._stride = int(sizes[0]) if len(sizes) and (sizes == sizes[0]).all() else 0

    def constant(self, at: Array, value: bytes) -> None:
        self.block(at, np.frombuffer(value, np.uint8)[None, :])

    def block(self, at: Array, values: Array) -> None:
        width = values.shape[1]
        if not width or not len(at):
            return
        if self._even(at):
            matrix: Array = np.ndarray((len(at), width), np.uint8, self.data, int(at[0]), (self._stride, 1))
            matrix[...] = values
            return
        window: Any = np.ndarray((len(self.data) - width + 1,), f"V{width}", self.data, 0, (1,))
        window[at] = np.ascontiguousarray(values).reshape(-1).view(f"V{width}")

    def words(self, kind: str, at: Array, values: Array) -> None:
        numbers = np.ascontiguousarray(values, kind)
        self.block(at, numbers.view(np.uint8).reshape(len(at), -1))

    def varints(self, at: Array, values: Array, taken: Array) -> None:
        if not len(at):
            return
        width = int(taken[0])
        if (taken == width).all():
            line, _ = varints.encode(values)
            self.block(at, line.reshape(-1, width))
            return
        for size in np.unique(taken).tolist():
            chosen = np.flatnonzero(taken == size)
            line, _ = varints.encode(values[chosen])
            self.block(at[chosen], line.reshape(-1, size))

    def ragged(self, at: Array, line: Array, sizes: Array) -> None:
        if not len(at):
            return
        width = int(sizes[0])
        if (sizes == width).all():
            self.block(at, line.reshape(-1, width) if width else line.reshape(len(at), 0))
            return
        if len(line) < _SHORT_BYTES * len(sizes):
            shift = np.repeat(at - (np.cumsum(sizes) - sizes), sizes)
            self.data[shift + np.arange(len(line))] = line
            return
        into, source = self.data.data, np.ascontiguousarray(line).data
        stops = np.cumsum(sizes)
        begins = (stops - sizes).tolist()
        for place, begin, stop in zip(at.tolist(), begins, stops.tolist(), strict=True):
            into[place : place + stop - begin] = source[begin:stop]

    def _even(self, at: Array) -> bool:
        return bool(self._stride) and len(at) == self._rows and bool((np.diff(at) == self._stride).all())


class _Framed:
    """Name, kind and lengths around a column's values; `fill` writes their bytes, of sizes `bodies`."""

    def __init__(
        self,
        name: str,
        kind: int,
        present: Array | None,
        bodies: Array,
        fill: Callable[[_Out, Array], None],
        rows: int,
    ) -> None:
        key = name.encode()
        self._tag = bytes((kind << 3 | 2,))
        self._key = b"\x0a" + varints.one(len(key)) + key + b"\x12"
        self._present, self._bodies, self._fill = present, bodies, fill
        self._list_taken = varints.sizes(bodies)
        self._feature = 1 + self._list_taken + bodies
        self._feature_taken = varints.sizes(self._feature)
        self._entry = len(self._key) + self._feature_taken + self._feature
        self._entry_taken = varints.sizes(self._entry)
        whole = 1 + self._entry_taken + self._entry
        self.sizes: Array = whole
        if present is not None:
            self.sizes = np.zeros(rows, np.int64)
            self.sizes[present] = whole

    def write(self, out: _Out, at: Array) -> None:
        if self._present is not None:
            at = at[self._present]
        if not len(at):
            return
        size = int(self._bodies[0])
        if (self._bodies == size).all():
            feature = self._tag + varints.one(size)
            entry = self._key + varints.one(len(feature) + size) + feature
            head = b"\x0a" + varints.one(len(entry) + size) + entry
            out.constant(at, head)
            at = at + len(head)
        else:
            out.constant(at, b"\x0a")
            out.varints(at + 1, self._entry, self._entry_taken)
            at = at + 1 + self._entry_taken
            out.constant(at, self._key)
            at = at + len(self._key)
            out.varints(at, self._feature, self._feature_taken)
            at = at + self._feature_taken
            out.constant(at, self._tag)
            out.varints(at + 1, self._bodies, self._list_taken)
            at = at + 1 + self._list_taken
        self._fill(out, at)


def _column(name: str, array: pa.Array, where: Where) -> _Framed | None:
    """None for a column of nulls only."""
    rows = len(array)
    present, counts, leaves = _flat(name, array, where)
    chosen = None if present is None else np.flatnonzero(present)
    if chosen is not None:
        counts = counts[chosen]
    if types.is_null(leaves.type):
        return None
    source = _Rows(name, where, chosen, counts)
    kind = kind_of(leaves.type)
    if kind == BYTES:
        bodies, fill = _bytes(leaves, counts)
    elif kind == FLOAT:
        bodies, fill = _packed(_floats(leaves, source).view(np.uint8), counts * 4)
    else:
        assert kind == INT64, "the types have been checked"
        line, taken = varints.encode(_integers(leaves, source))
        bodies, fill = _packed(line, _sums(taken, counts))
    return _Framed(name, kind, chosen, bodies, fill, rows)


@dataclass(frozen=True, slots=True)
class _Rows:
    name: str
    where: Where
    present: Array | None
    counts: Array

    def error(self, value: int, problem: str) -> DataError:
        row = int(np.searchsorted(np.cumsum(self.counts), value, side="right"))
        if self.present is not None:
            row = int(self.present[row])
        return DataError(problem, column=self.name, row=self.where(row))


def _flat(name: str, array: pa.Array, where: Where) -> tuple[Array | None, Array, pa.Array]:
    """Rows that have values (None for all), values per row, and the flat values."""
    array = _plain(array)
    present = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
    if not is_list(array.type):
        counts = np.ones(len(array), np.int64) if present is None else present.astype(np.int64)
        return present, counts, array if present is None else array.drop_null()
    counts = numbers(pc.fill_null(pc.list_value_length(array), 0)).astype(np.int64)
    inside = _plain(array.flatten())
    if inside.null_count:
        value = int(np.argmax(inside.is_null().to_numpy(zero_copy_only=False)))
        row = int(np.searchsorted(np.cumsum(counts), value, side="right"))
        raise DataError(
            "holds a null inside a list, which a tf.train.Example cannot represent.\n"
            "Hint: fill or drop such values first.",
            column=name,
            row=where(row),
        )
    owner = np.cumsum(counts)
    _, inner, leaves = _flat(name, inside, lambda i: where(int(np.searchsorted(owner, i, side="right"))))
    return present, counts if inside is leaves else _sums(inner, counts), leaves


def _plain(array: pa.Array) -> pa.Array:
    if isinstance(array.type, pa.FixedShapeTensorType) and array.type.permutation is not None:
        array = pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(array.to_numpy_ndarray()))
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    return array.dictionary_decode() if types.is_dictionary(array.type) else array


def _sums(values: Array, counts: Array) -> Array:
    if len(values) == len(counts) and (counts == 1).all():
        return values
    upto = np.concatenate(([0], np.cumsum(values)))
    stops = np.cumsum(counts)
    sums: Array = upto[stops] - upto[stops - counts]
    return sums


def _packed(line: Array, sizes: Array) -> tuple[Array, Callable[[_Out, Array], None]]:
    taken = varints.sizes(sizes)
    if len(sizes) and sizes.min() > 0:
        return 1 + taken + sizes, lambda out, at: _fill_packed(out, at, line, sizes, taken)
    some = np.flatnonzero(sizes)
    bodies = np.where(sizes > 0, 1 + taken + sizes, 0)
    return bodies, lambda out, at: _fill_packed(out, at[some], line, sizes[some], taken[some])


def _fill_packed(out: _Out, at: Array, line: Array, sizes: Array, taken: Array) -> None:
    out.constant(at, b"\x0a")
    out.varints(at + 1, sizes, taken)
    out.ragged(at + 1 + taken, line, sizes)


def _bytes(leaves: pa.Array, counts: Array) -> tuple[Array, Callable[[_Out, Array], None]]:
    line, sizes = _strings(leaves)
    taken = varints.sizes(sizes)
    whole = 1 + taken + sizes
    bodies = _sums(whole, counts)

    def fill(out: _Out, at: Array) -> None:
        if not (len(whole) == len(counts) and (counts == 1).all()):
            before = np.cumsum(whole) - whole
            first = np.cumsum(bodies) - bodies
            at = np.repeat(at - first, counts) + before
        out.constant(at, b"\x0a")
        out.varints(at + 1, sizes, taken)
        out.ragged(at + 1 + taken, line, sizes)

    return bodies, fill


def _strings(leaves: pa.Array) -> tuple[Array, Array]:
    large = leaves.cast(pa.binary()) if types.is_fixed_size_binary(leaves.type) else leaves
    large = large.cast(pa.large_binary())
    offsets = np.frombuffer(large.buffers()[1], np.int64)[large.offset : large.offset + len(large) + 1]
    if not len(large) or offsets[0] == offsets[-1]:
        return np.empty(0, np.uint8), np.zeros(len(large), np.int64)
    line: Array = np.frombuffer(large.buffers()[2], np.uint8)[int(offsets[0]) : int(offsets[-1])]
    return line, np.diff(offsets)


def _floats(leaves: pa.Array, source: _Rows) -> Array:
    values = numbers(leaves)
    if values.dtype != np.float64:
        return np.ascontiguousarray(values, "<f4")
    with np.errstate(over="ignore"):
        narrow = values.astype("<f4")
    too_large = np.isinf(narrow) & np.isfinite(values)
    if too_large.any():
        at = int(np.argmax(too_large))
        raise source.error(at, f"{values[at]} is too large for the 32 bits of a float_list.")
    return narrow


def _integers(leaves: pa.Array, source: _Rows) -> Array:
    if types.is_boolean(leaves.type):
        leaves = leaves.cast(pa.uint8())
    values = numbers(leaves)
    if values.dtype == np.uint64:
        too_large = values > np.uint64(_INT64_MAX)
        if too_large.any():
            at = int(np.argmax(too_large))
            raise source.error(at, f"{values[at]} is too large for an int64_list.")
    return values.astype(np.int64, copy=False)


# Rows are encoded so many bytes at a time, which stay in the processor's cache until they are written.
_CHUNK_BYTES = 2 << 20


def write_files(
    data: Any,
    path: str,
    *,
    compression: Literal["gzip"] | None,
    rows_per_file: int | None,
    overwrite: bool,
    columns: Sequence[str] | None,
) -> list[str]:
    """See `kindler.tfrecord.write`."""
    part_name(0, compression)
    if rows_per_file is not None and rows_per_file < 1:
        raise ConfigError(f"rows_per_file={rows_per_file}: must be at least 1.")
    path = absolute(path)
    schema, rows = _batches(data, columns)
    checked(schema)
    with staged(path, folder=rows_per_file is not None, overwrite=overwrite) as beside:
        if rows_per_file is None:
            write_rows(rows, beside, compression)
            return [path]
        names = _write_parts(rows, beside, compression, rows_per_file)
        return [f"{path}/{name}" for name in names]


def checked(schema: pa.Schema) -> None:
    for field in schema:
        problem = refusal(field.type)
        if problem:
            raise DataError(problem, column=field.name)
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise ConfigError(f"several columns are named {twice}; names must be unique.")


def write_rows(
    batches: Iterable[pa.RecordBatch],
    file: str,
    compression: Literal["gzip"] | None,
    *,
    where: Callable[[int], int | str] = int,
) -> int:
    rows = 0
    with written(file, compression) as out:
        for batch in batches:
            for chunk in _chunks(batch):
                out.write(encode(chunk, where=lambda row, first=rows: where(first + row)).data)  # type: ignore[misc]
                rows += chunk.num_rows
    return rows


def _write_parts(
    batches: Iterator[pa.RecordBatch],
    folder: str,
    compression: Literal["gzip"] | None,
    rows_per_file: int,
) -> list[str]:
    names: list[str] = []
    row = 0
    for part in _parts(batches, rows_per_file):
        name = part_name(len(names), compression)
        row += write_rows(part, f"{folder}/{name}", compression, where=partial(add, row))
        names.append(name)
    return names


def _parts(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[list[pa.RecordBatch]]:
    held: list[pa.RecordBatch] = []
    room = rows
    for batch in batches:
        while batch.num_rows >= room:
            held.append(batch.slice(0, room))
            yield held
            batch, held, room = batch.slice(room), [], rows
        if batch.num_rows:
            held.append(batch)
            room -= batch.num_rows
    if held:
        yield held


def _chunks(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if not batch.num_rows:
        return
    step = max(_CHUNK_BYTES * batch.num_rows // max(batch.nbytes, 1), 1)
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)


def _batches(data: Any, columns: Sequence[str] | None) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    if isinstance(data, pa.RecordBatchReader):
        picked = chosen(data.schema.names, columns)
        schema = pa.schema([data.schema.field(name) for name in picked])
        return schema, (batch.select(picked) for batch in data)
    table = _table(data, columns)
    return table.schema, iter(table.to_batches())


def _table(data: Any, columns: Sequence[str] | None) -> pa.Table:
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        return data if columns is None else data.select(chosen(data.schema.names, columns))
    if not is_local_data(data) or isinstance(data, tuple | np.ndarray):
        raise ConfigError(
            f"data is {kind(data)}.\n"
            "Hint: pass a pyarrow Table, a pandas DataFrame, a dict of arrays, or a Spark DataFrame."
        )
    found = named(data).columns
    arrays = {name: _arrow_column(found[name], name) for name in chosen(list(found), columns)}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"columns have different lengths: {lengths}.")
    return pa.table(arrays)


def chosen(names: Sequence[str], columns: Sequence[str] | None) -> list[str]:
    if columns is None:
        return list(names)
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r} must be a list.\nHint: columns=[{columns!r}].")
    missing = [name for name in columns if name not in names]
    if missing:
        raise ConfigError(f"columns={list(columns)}: {missing} are not among {list(names)}.")
    return list(columns)


def _arrow_column(column: Any, name: str) -> pa.Array | pa.ChunkedArray:
    if hasattr(column, "iloc") and str(column.dtype) == "object":
        try:
            return pa.array(column, from_pandas=True)  # None and NaN between strings are nulls
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            pass  # cells that are arrays of several axes
    array = values(column, name)
    if not isinstance(array, np.ndarray):
        return array
    if array.ndim == 1:
        return pa.array(array)
    width = int(np.prod(array.shape[1:]))
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(array).reshape(-1)), width)
