"""RecordBatches to records, many at a time: the bytes of a column are put in place for all rows at once.

First every column says how many bytes it takes in each row, then the records' places are known, then every
column writes its bytes. Where all records have the same layout the places are the columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from kindler.data.columns import Array, Where
from kindler.data.tfrecord import varints
from kindler.data.tfrecord.canonical import BYTES, FLOAT, INT64
from kindler.data.tfrecord.framing import AROUND, HEAD, checksum, length_checksums, masked
from kindler.data.tfrecord.schema import is_list, kind_of
from kindler.errors import DataError

_SHORT_BYTES = 24
_INT64_MAX = np.iinfo(np.int64).max


def encode(batch: pa.RecordBatch, *, where: Where = int) -> Array:
    """The records of all rows, with lengths and checksums, as one array of bytes.

    Args:
        batch: The rows; their types have been checked with `schema.refusal`.
        where: Names a row in complaints, given its place in the batch.

    Raises:
        DataError: A null inside a list, or a number that the file cannot hold.
    """
    rows = batch.num_rows
    if not rows:
        return np.empty(0, np.uint8)
    columns = [
        _column(str(field.name), array, where)
        for field, array in zip(batch.schema, batch.columns, strict=True)
    ]
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
    """The checksums of the data, now that it is there."""
    data, crc = out.data.tobytes(), checksum()
    pairs = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
    sums = [crc(data[start:stop]) for start, stop in pairs]
    out.words("<u4", starts + sizes, masked(np.array(sums, np.uint32)))


class _Out:
    """Bytes to be filled, at one place in every record at a time.

    Where all records are of one size, places given for all of them are assumed to be at one distance.
    """

    def __init__(self, data: Array, records: Array, sizes: Array) -> None:
        self.data = data
        self._rows = len(records)
        self._stride = int(sizes[0]) if len(sizes) and (sizes == sizes[0]).all() else 0

    def constant(self, at: Array, value: bytes) -> None:
        """The same bytes everywhere."""
        self.block(at, np.frombuffer(value, np.uint8)[None, :])

    def block(self, at: Array, values: Array) -> None:
        """A row of bytes at each place; one row is for all places."""
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
        """A number at each place."""
        numbers = np.ascontiguousarray(values, kind)
        self.block(at, numbers.view(np.uint8).reshape(len(at), -1))

    def varints(self, at: Array, values: Array, taken: Array) -> None:
        """A number as a varint at each place."""
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
        """The pieces of a line, each at its place."""
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


class _Column(Protocol):
    """One column's bytes."""

    @property
    def sizes(self) -> Array:
        """How many it takes in each row."""

    def write(self, out: _Out, at: Array) -> None:
        """Put them where they belong."""


class _Nothing:
    """A column of nulls only."""

    def __init__(self, rows: int) -> None:
        self.sizes: Array = np.zeros(rows, np.int64)

    def write(self, out: _Out, at: Array) -> None:
        """There is nothing to write."""


class _Framed:
    """Name, kind and lengths around the values of a column.

    Args:
        name: The column.
        kind: What its values are.
        present: The rows that have it; None for all.
        bodies: How many bytes the list has in each of those rows.
        fill: Writes the lists, given their places.
        rows: How many rows there are.
    """

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


def _column(name: str, array: pa.Array, where: Where) -> _Column:
    rows = len(array)
    present, counts, leaves = _flat(name, array, where)
    chosen = None if present is None else np.flatnonzero(present)
    if chosen is not None:
        counts = counts[chosen]
    if types.is_null(leaves.type):
        return _Nothing(rows)
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
    """Names the row of a value."""

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
    """Which rows have values (None for all), how many each has, and all of them in one line."""
    array = _plain(array)
    present = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
    if not is_list(array.type):
        counts = np.ones(len(array), np.int64) if present is None else present.astype(np.int64)
        return present, counts, array if present is None else array.drop_null()
    counts = _numbers(pc.fill_null(pc.list_value_length(array), 0)).astype(np.int64)
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
    """The sum over each row's share of the values."""
    if len(values) == len(counts) and (counts == 1).all():
        return values
    upto = np.concatenate(([0], np.cumsum(values)))
    stops = np.cumsum(counts)
    sums: Array = upto[stops] - upto[stops - counts]
    return sums


def _packed(line: Array, sizes: Array) -> tuple[Array, Callable[[_Out, Array], None]]:
    """Lists of numbers: a tag, a length and the numbers' bytes; nothing where there is no number."""
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
    """Lists of bytes: a tag, a length and the bytes for each."""
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
    """The bytes of all strings in one line, and how long each is."""
    large = leaves.cast(pa.binary()) if types.is_fixed_size_binary(leaves.type) else leaves
    large = large.cast(pa.large_binary())
    offsets = np.frombuffer(large.buffers()[1], np.int64)[large.offset : large.offset + len(large) + 1]
    if not len(large) or offsets[0] == offsets[-1]:
        return np.empty(0, np.uint8), np.zeros(len(large), np.int64)
    line: Array = np.frombuffer(large.buffers()[2], np.uint8)[int(offsets[0]) : int(offsets[-1])]
    return line, np.diff(offsets)


def _floats(leaves: pa.Array, source: _Rows) -> Array:
    values = _numbers(leaves)
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
    values = _numbers(leaves)
    if values.dtype == np.uint64:
        too_large = values > np.uint64(_INT64_MAX)
        if too_large.any():
            at = int(np.argmax(too_large))
            raise source.error(at, f"{values[at]} is too large for an int64_list.")
    return values.astype(np.int64, copy=False)


def _numbers(array: pa.Array) -> Array:
    """Numbers without nulls as numpy; not with pyarrow's `to_numpy`, which imports pandas."""
    kind = np.dtype(array.type.to_pandas_dtype())
    if not len(array):
        return np.empty(0, kind)
    start = array.offset * kind.itemsize
    values: Array = np.frombuffer(array.buffers()[1], kind, len(array), start)
    return values
