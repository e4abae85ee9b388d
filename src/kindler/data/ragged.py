"""Columns whose rows differ in length (lists, text, bytes), and how they are padded. All values lie in one
flat array with offsets, so that a batch is two gathers and a spool two files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from pyarrow import types

from kindler.data.columns import (
    BINARY,
    TEXT,
    Array,
    Column,
    Where,
    chunks,
    conform,
    is_any,
    is_list,
    refuse_nulls,
    to_numpy,
)
from kindler.errors import ConfigError, DataError

_TEXT = ("str", "bytes")


class Ragged:
    """Row `i` is `flat[offsets[i]:offsets[i + 1]]`. Text is uint8, lists of text JSON in uint8. `inner` is
    the shape of one list item; for text, () means one text per row, (None,) a list of them."""

    def __init__(self, flat: Array, offsets: Array, *, kind: str, inner: tuple[int | None, ...] = ()) -> None:
        self.flat, self.offsets = flat, offsets
        self.kind, self.inner = kind, inner

    @staticmethod
    def empty(kind: str, shape: Sequence[int | None]) -> Ragged:
        offsets = np.zeros(1, np.int64)
        if kind in _TEXT:
            return Ragged(np.empty(0, np.uint8), offsets, kind=kind, inner=tuple(shape))
        inner = tuple(int(size or 0) for size in shape[1:])
        return Ragged(np.empty((0, *inner), kind), offsets, kind=kind, inner=inner)

    @staticmethod
    def holds(kind: str | None, shape: Sequence[int | None] | None) -> bool:
        return kind in _TEXT or bool(shape and shape[0] is None)

    @property
    def is_text(self) -> bool:
        return self.kind in _TEXT

    @property
    def entry(self) -> list[Any]:
        return [self.kind, list(self.inner) if self.is_text else [None, *self.inner]]

    @property
    def lengths(self) -> Array:
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        values = int(self.offsets[-1] - self.offsets[0])
        return values * self.flat[:1].nbytes + int(self.offsets.nbytes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self._like(self.flat, self.offsets[start : max(start, stop) + 1])
            rows = np.arange(start, stop, step)
        if isinstance(rows, int | np.integer):
            return self._value(int(self.offsets[rows]), int(self.offsets[rows + 1]))
        return self.take(np.asarray(rows))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows())

    def take(self, rows: slice | Array) -> Ragged:
        if isinstance(rows, slice):
            part = self[rows]
            first, last = int(part.offsets[0]), int(part.offsets[-1])
            return self._like(part.flat[first:last].copy(), part.offsets - first)
        starts = self.offsets[rows]
        lengths = self.offsets[np.asarray(rows) + 1] - starts
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        places = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        return self._like(self.flat[places], offsets)

    def rows(self) -> list[Any]:
        bounds = self.offsets.tolist()
        return [self._value(start, stop) for start, stop in pairwise(bounds)]

    def even(self) -> Array | None:
        lengths = self.lengths
        if self.is_text or (len(lengths) and lengths.min() != lengths.max()):
            return None
        width = int(lengths[0]) if len(lengths) else 0
        flat = self.flat[int(self.offsets[0]) : int(self.offsets[-1])]
        return flat.reshape(len(self), width, *flat.shape[1:])

    def tobytes(self) -> bytes:
        whole = self.take(slice(None))
        return whole.offsets.tobytes() + whole.flat.tobytes()

    def to_arrow(self) -> pa.Array:
        whole = self.take(slice(None))
        if self.is_text and not self.inner:
            size = pa.large_utf8() if self.kind == "str" else pa.large_binary()
            buffers = [None, pa.py_buffer(whole.offsets.tobytes()), pa.py_buffer(whole.flat.tobytes())]
            return pa.Array.from_buffers(size, len(whole), buffers)
        if self.is_text:
            return pa.array(whole.rows(), pa.list_(pa.string()))
        values: Any = pa.array(whole.flat.reshape(-1))
        for size_of in reversed(whole.inner):
            values = pa.FixedSizeListArray.from_arrays(values, int(size_of or 0))
        return pa.LargeListArray.from_arrays(pa.array(whole.offsets), values)

    def _like(self, flat: Array, offsets: Array) -> Ragged:
        return Ragged(flat, offsets, kind=self.kind, inner=self.inner)

    def _value(self, start: int, stop: int) -> Any:
        part = self.flat[start:stop]
        if not self.is_text:
            return part.copy()  # user code may write into it
        raw = part.tobytes()
        if self.kind == "bytes":
            return raw
        return json.loads(raw) if self.inner else raw.decode()


def concatenated(parts: Sequence[Any]) -> Any:
    if not isinstance(parts[0], Ragged):
        return np.concatenate(parts)
    whole = [part.take(slice(None)) for part in parts]
    ends = np.cumsum([0, *(int(part.offsets[-1]) for part in whole)])
    offsets = [part.offsets[1:] + end for part, end in zip(whole, ends, strict=False)]
    # Rows without a value do not say what shape their values would have.
    told = [part for part in whole if len(part.flat)] or whole[:1]
    first = told[0]
    return Ragged(
        np.concatenate([part.flat for part in told]),
        np.concatenate([np.zeros(1, np.int64), *offsets]),
        kind=first.kind,
        inner=first.inner,
    )


def read_column(values: Any, column: Column, *, where: Where) -> Any:
    if column.ragged:
        return to_ragged(values, column, where=where)
    if isinstance(values, np.ndarray):
        return conform(values, column, where=where)
    return to_numpy(values, column, where=where)


def to_ragged(values: Any, column: Column, *, where: Where) -> Ragged:
    if isinstance(values, Ragged):
        return values
    if isinstance(values, pa.ChunkedArray):
        parts = [to_ragged(chunk, column, where=row) for chunk, row in chunks(values, where)]
        return parts[0] if len(parts) == 1 else concatenated(parts)
    if isinstance(values, np.ndarray):
        values = pa.array(list(values))
    if isinstance(values.type, pa.BaseExtensionType):
        values = values.storage
    if types.is_dictionary(values.type):
        values = values.dictionary_decode()
    refuse_nulls(values, column, where)
    if is_list(values.type):
        return _lists(values, column, where)
    return _texts(values)


def _texts(values: pa.Array) -> Ragged:
    binary = is_any(values.type, BINARY)
    wide = values.cast(pa.large_binary() if binary else pa.large_utf8())
    kind = "bytes" if binary else "str"
    if not len(wide):
        return Ragged.empty(kind, ())
    _, offsets, data = wide.buffers()
    bounds = np.frombuffer(offsets, np.int64)[wide.offset : wide.offset + len(wide) + 1]
    every = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return Ragged(every[bounds[0] : bounds[-1]], bounds - bounds[0], kind=kind)


def _lists(values: pa.Array, column: Column, where: Where) -> Ragged:
    if types.is_fixed_size_list(values.type):
        size = values.type.list_size
        offsets, inner = np.arange(len(values) + 1, dtype=np.int64) * size, values.flatten()
    else:
        offsets = values.offsets.to_numpy().astype(np.int64)
        inner = values.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        offsets = offsets - offsets[0]

    def row_of(value: int) -> int:
        return int(np.searchsorted(offsets, value, side="right")) - 1

    if is_any(inner.type, TEXT):
        refuse_nulls(inner, column, where, "holds a null", row_of)
        texts = inner.to_pylist()
        encoded = [json.dumps(texts[start:stop]).encode() for start, stop in pairwise(offsets.tolist())]
        ends = np.cumsum([0, *map(len, encoded)]).astype(np.int64)
        return Ragged(np.frombuffer(b"".join(encoded), np.uint8), ends, kind="str", inner=(None,))
    try:
        flat = to_numpy(inner, replace(column, shape=None, ragged=False), where=lambda i: where(row_of(i)))
    except DataError as exc:
        exc.positions = exc.positions and sorted({row_of(i) for i in exc.positions})
        raise
    return Ragged(flat, offsets, kind=flat.dtype.name, inner=flat.shape[1:])


Pad: TypeAlias = 'Literal["batch"] | int'
PadValue: TypeAlias = "float | int | str"
AsLists: TypeAlias = Literal["always", "never", "lists"]

_IGNORED = -100  # what PyTorch's losses leave out


def rule_for(pad: Any, name: str) -> Any:
    return pad.get(name) if isinstance(pad, Mapping) else pad


def fill_value(given: Any, name: str, rows: Ragged, role: str) -> Any:
    value = given.get(name) if isinstance(given, Mapping) else given
    if value is not None and not (role == "label" and not isinstance(given, Mapping)):
        return value
    if role == "feature":
        return "" if rows.flat.dtype == object else 0
    if rows.flat.dtype.kind in "iu":
        return _IGNORED
    raise ConfigError(
        f"the rows of the label {name!r} differ in length, and no padding value is known that the loss "
        f"ignores.\nHint: pass prepare=Prepare(pad_value={{{name!r}: ...}})."
    )


def padded(
    rows: Ragged, pad: Pad, value: Any, *, width: int | None, column: str, where: Where
) -> tuple[Array, Array]:
    """The mask is True at real values; `width` is the longest row of the step over all workers, if known."""
    lengths = rows.lengths
    longest = int(lengths.max(initial=0))
    size = max(1, width or 0, longest) if pad == "batch" else int(pad)
    if longest > size:
        row = int(np.argmax(lengths))
        raise DataError(
            f"has {lengths[row]} values, more than pad={size}.\nHint: cut such rows in a transform, pad to"
            ' more, or pass prepare=Prepare(pad="batch").',
            column=column,
            row=where(row),
            positions=np.flatnonzero(lengths > size).tolist(),
        )
    inner = rows.flat.shape[1:]
    array = np.full((len(rows), size, *inner), value, rows.flat.dtype)
    mask: Array = np.arange(size) < lengths[:, None]
    first, last = int(rows.offsets[0]), int(rows.offsets[-1])
    array[mask] = rows.flat[first:last]
    return array, mask


def gathered(values: Any, as_lists: AsLists) -> Ragged | Array | None:
    """None if rows fit neither; `as_lists` says whether rows that would fit one array become ragged."""
    if isinstance(values, np.ndarray) and as_lists == "never" and values.dtype != object:
        return values
    if isinstance(values[0], str | bytes):
        whole = np.empty(len(values), object)
        whole[:] = values
        return whole
    arrays = [_array(value) for value in values]
    shapes = {array.shape for array in arrays}
    lists = as_lists == "lists" and all(array.ndim == 1 for array in arrays)
    if len(shapes) == 1 and (not arrays[0].ndim or not (lists or as_lists == "always")):
        return np.stack(arrays)
    inner = {array.shape[1:] for array in arrays if array.ndim}
    if len(inner) != 1 or any(not array.ndim for array in arrays) or as_lists == "never":
        return None
    if as_lists == "lists" and not lists:
        return None
    offsets = np.cumsum([0, *(len(array) for array in arrays)]).astype(np.int64)
    filled = [array for array in arrays if len(array)] or arrays[:1]  # an empty list would make floats of all
    flat = np.concatenate(filled)
    return Ragged(flat, offsets, kind=flat.dtype.name, inner=flat.shape[1:])


def _array(value: Any) -> Array:
    detach = getattr(value, "detach", None)
    if callable(detach):
        return np.asarray(detach().cpu())
    if isinstance(value, list | tuple) and any(isinstance(item, str) for item in value):
        texts = np.empty(len(value), object)
        texts[:] = value
        return texts
    return np.asarray(value)
