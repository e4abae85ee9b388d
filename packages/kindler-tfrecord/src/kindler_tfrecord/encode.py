"""Encodes RecordBatches as records, one column at a time for all rows. Every column reports its bytes per
row, which fixes the places of the records; then every column writes its bytes. If all records have the
same layout, the places are columns of a matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from kindler_tfrecord import varints
from kindler_tfrecord.framing import (
    AROUND,
    HEAD,
    Array,
    TFRecordError,
    data_checksums,
    length_checksums,
)
from kindler_tfrecord.schema import BYTES, FLOAT, INT64, is_list, kind_of

Where: TypeAlias = Callable[[int], "int | str"]
_Error: TypeAlias = Callable[[int, str], TFRecordError]  # for the value at a place, what is wrong with it
_Fill: TypeAlias = Callable[["_Out", Array], None]

_SHORT_BYTES = 24
_INT64_MAX = np.iinfo(np.int64).max


def encode(batch: pa.RecordBatch, *, where: Where = int) -> Array:
    """The bytes of all records, with lengths and checksums. The types must have passed `check_types`.

    `where` names a row of the batch in a TFRecordError: about a null inside a list, or a number too large.
    """
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
    sums = data_checksums(out.data.tobytes(), records + HEAD, payload)
    out.words("<u4", records + HEAD + payload, sums)
    return out.data


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

    def fields(self, at: Array, line: Array, sizes: Array, taken: Array) -> None:
        self.constant(at, b"\x0a")
        self.varints(at + 1, sizes, taken)
        self.ragged(at + 1 + taken, line, sizes)

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
        fill: _Fill,
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
    present, counts, leaves = _flat(name, array, where)
    if types.is_null(leaves.type):
        return None
    error = partial(_error, name, where, counts)
    chosen = None if present is None else np.flatnonzero(present)
    if chosen is not None:
        counts = counts[chosen]
    kind = kind_of(leaves.type)
    if kind == BYTES:
        bodies, fill = _bytes(leaves, counts)
    elif kind == FLOAT:
        bodies, fill = _packed(_floats(leaves, error).view(np.uint8), counts * 4)
    else:
        assert kind == INT64, "the types have been checked"
        line, taken = varints.encode(_integers(leaves, error))
        bodies, fill = _packed(line, _sums(taken, counts))
    return _Framed(name, kind, chosen, bodies, fill, len(array))


def _error(name: str, where: Where, counts: Array, value: int | np.intp, problem: str) -> TFRecordError:
    row = where(int(np.searchsorted(np.cumsum(counts), value, side="right")))
    return TFRecordError(f"column {name!r}, row {row}: {problem}", column=name, row=row)


def _flat(name: str, array: pa.Array, where: Where) -> tuple[Array | None, Array, pa.Array]:
    """Rows that have values (None for all), values per row, and the flat values."""
    array = _plain(array)
    present = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
    if not is_list(array.type):
        counts = np.ones(len(array), np.int64) if present is None else present.astype(np.int64)
        return present, counts, array if present is None else array.drop_null()
    counts = _numbers(pc.fill_null(pc.list_value_length(array), 0)).astype(np.int64)
    inside = _plain(array.flatten())
    if inside.null_count:
        problem = (
            "holds a null inside a list, which a tf.train.Example cannot represent.\n"
            "Hint: fill or drop such values first."
        )
        nulls = inside.is_null().to_numpy(zero_copy_only=False)
        raise _error(name, where, counts, np.argmax(nulls), problem)
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


def _packed(line: Array, sizes: Array) -> tuple[Array, _Fill]:
    taken = varints.sizes(sizes)
    some: Any = np.flatnonzero(sizes) if len(sizes) and not sizes.min() else slice(None)
    bodies = np.where(sizes > 0, 1 + taken + sizes, 0)
    return bodies, lambda out, at: out.fields(at[some], line, sizes[some], taken[some])


def _bytes(leaves: pa.Array, counts: Array) -> tuple[Array, _Fill]:
    line, sizes = _strings(leaves)
    taken = varints.sizes(sizes)
    whole = 1 + taken + sizes
    bodies = _sums(whole, counts)

    def fill(out: _Out, at: Array) -> None:
        if not (len(whole) == len(counts) and (counts == 1).all()):
            before = np.cumsum(whole) - whole
            first = np.cumsum(bodies) - bodies
            at = np.repeat(at - first, counts) + before
        out.fields(at, line, sizes, taken)

    return bodies, fill


def _strings(leaves: pa.Array) -> tuple[Array, Array]:
    large = leaves.cast(pa.binary()) if types.is_fixed_size_binary(leaves.type) else leaves
    large = large.cast(pa.large_binary())
    offsets = np.frombuffer(large.buffers()[1], np.int64)[large.offset : large.offset + len(large) + 1]
    if not len(large) or offsets[0] == offsets[-1]:
        return np.empty(0, np.uint8), np.zeros(len(large), np.int64)
    line: Array = np.frombuffer(large.buffers()[2], np.uint8)[int(offsets[0]) : int(offsets[-1])]
    return line, np.diff(offsets)


def _numbers(array: pa.Array) -> Array:
    """Without pyarrow's `to_numpy` and `to_pandas_dtype`, which import pandas."""
    kind, size = array.type, array.type.bit_width // 8
    dtype = f"{'f' if types.is_floating(kind) else 'u' if types.is_unsigned_integer(kind) else 'i'}{size}"
    if not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * size)


def _floats(leaves: pa.Array, error: _Error) -> Array:
    values = _numbers(leaves)
    if values.dtype != np.float64:
        return np.ascontiguousarray(values, "<f4")
    with np.errstate(over="ignore"):
        narrow = values.astype("<f4")
    too_large = np.isinf(narrow) & np.isfinite(values)
    if too_large.any():
        at = int(np.argmax(too_large))
        raise error(at, f"{values[at]} is too large for the 32 bits of a float_list.")
    return narrow


def _integers(leaves: pa.Array, error: _Error) -> Array:
    values = _numbers(leaves.cast(pa.uint8()) if types.is_boolean(leaves.type) else leaves)
    if values.dtype == np.uint64:
        too_large = values > np.uint64(_INT64_MAX)
        if too_large.any():
            at = int(np.argmax(too_large))
            raise error(at, f"{values[at]} is too large for an int64_list.")
    return values.astype(np.int64, copy=False)
