"""The values of one column in one block, before they become Arrow: how many each record has, and which.

`ragged` reads any records. `even` reads those of which all have the same layout, byte for byte, apart from
their values: then a column is a slice of one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kindler.data.columns import Array
from kindler.data.tfrecord import varints
from kindler.data.tfrecord.canonical import BYTES, FLOAT
from kindler.data.tfrecord.feature_index import Entries, Lists, Unusual, entries, items, lists, packed
from kindler.data.tfrecord.framing import AROUND, Block

_SHORT_BYTES = 24  # pieces below this are gathered byte by byte, longer ones one by one
_FEWEST_ROWS = 16  # not worth a layout


@dataclass(frozen=True, slots=True)
class Values:
    """One column of a block.

    Attributes:
        present: Which records have it; None for all.
        counts: How many values each record has; one number if all have the same.
        flat: The values of all records: int64 or float32, or the bytes of all strings.
        sizes: For bytes, the length of each; one number if all have the same.
    """

    present: Array | None
    counts: Array | int
    flat: Array
    sizes: Array | int | None = None


class WrongKind(Exception):
    """A record whose values are not of the kind that was expected."""

    def __init__(self, record: int, found: int) -> None:
        super().__init__(record, found)
        self.record = record
        self.found = found


def ragged(block: Block, all_entries: Entries, name: bytes, kind: int | None) -> tuple[int, Values] | None:
    """The column of that name, whatever the records look like; None if no record has it.

    Args:
        block: The records.
        all_entries: Their features.
        name: The column.
        kind: What its values must be; None for what the first record has.

    Returns:
        The kind, and the values.

    Raises:
        Unusual: Some records have an unusual form.
        WrongKind: A record has values of another kind.
    """
    chosen = all_entries.named(block, name)
    if not len(chosen):
        return None
    features = all_entries.of(chosen)
    if len(chosen) > 1 and not (np.diff(features.record) > 0).all():
        features = features.of(_last_of_each(features.record))
    listed = lists(block, features)
    filled = listed.start < listed.stop
    if kind is None:
        kinds = listed.kind[filled] if filled.any() else listed.kind
        kind = int(kinds[0]) or BYTES
    wrong = filled & (listed.kind != kind)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise WrongKind(int(features.record[at]), int(listed.kind[at]))
    return kind, _scattered(block, features, listed, kind)


def even(block: Block, wanted: Mapping[bytes, int]) -> dict[bytes, Values] | None:
    """The wanted columns, if all records have the layout of the first; otherwise None.

    A name that the first record does not have is not in the result.

    Raises:
        WrongKind: The first record has values of another kind.
    """
    rows = len(block)
    size = int(block.sizes[0]) if rows else 0
    if rows < _FEWEST_ROWS or not size or not (block.sizes == size).all():
        return None
    if not (np.diff(block.starts) == size + AROUND).all():
        return None
    layout = _layout(block.head(1), wanted)
    if layout is None:
        return None
    matrix = _matrix(block, size)
    position = 0
    for span in sorted((s for spans in layout.values() for s in spans.free), key=lambda s: s[0]):
        if not _same(matrix[:, position : span[0]]):
            return None
        position = span[1]
    if not _same(matrix[:, position:]):
        return None
    columns: dict[bytes, Values] = {}
    for name, spans in layout.items():
        if spans.kind is not None:
            values = _sliced(matrix, spans)
            if values is None:
                return None
            columns[name] = values
    return columns


@dataclass(frozen=True, slots=True)
class _Spans:
    """Which bytes of a record are a column's values; kind None for a column that nobody wants."""

    kind: int | None
    free: tuple[tuple[int, int], ...]


def _layout(first: Block, wanted: Mapping[bytes, int]) -> dict[bytes, _Spans] | None:
    """Where the first record has its values, counted from its start."""
    base = int(first.starts[0])
    try:
        features = entries(first)
        listed = lists(first, features)
        layout: dict[bytes, _Spans] = {}
        for i in range(len(features.record)):
            key = int(features.key[i])
            name = first.data[key : key + int(features.key_size[i])]
            if name in layout:
                return None
            kind = wanted.get(name)
            if kind is None:
                layout[name] = _Spans(None, ((int(features.start[i]) - base, int(features.stop[i]) - base),))
                continue
            one = Lists(listed.kind[i : i + 1], listed.start[i : i + 1], listed.stop[i : i + 1])
            if one.kind[0] == 0:
                return None
            if one.start[0] < one.stop[0] and one.kind[0] != kind:
                raise WrongKind(0, int(one.kind[0]))
            layout[name] = _Spans(kind, _free(first, one, kind, base))
    except Unusual:
        return None
    return layout


def _free(first: Block, one: Lists, kind: int, base: int) -> tuple[tuple[int, int], ...]:
    record = np.zeros(1, np.int64)
    if kind == BYTES:
        _, starts, sizes = items(first, record, one)
    else:
        starts, sizes = packed(first, record, one, unit=4 if kind == FLOAT else 1)
        if not sizes[0]:
            return ()
    pairs = zip(starts.tolist(), sizes.tolist(), strict=True)
    return tuple((start - base, start - base + size) for start, size in pairs)


def _sliced(matrix: Array, spans: _Spans) -> Values | None:
    rows = len(matrix)
    if spans.kind == BYTES:
        return _sliced_bytes(matrix, spans.free)
    if not spans.free:
        return Values(None, 0, np.empty(0, np.float32 if spans.kind == FLOAT else np.int64))
    ((start, stop),) = spans.free
    block = matrix[:, start:stop]
    if spans.kind == FLOAT:
        return Values(None, (stop - start) // 4, np.ascontiguousarray(block).reshape(-1).view("<f4"))
    more = block & 0x80
    if not _same(more) or more[0, -1]:
        return None
    count = int((more[0] == 0).sum())
    if count == stop - start:
        return Values(None, count, block.astype(np.int64).reshape(-1))
    try:
        flat, _ = varints.decode(np.ascontiguousarray(block).reshape(-1))
    except ValueError:
        return None
    return Values(None, len(flat) // rows, flat)


def _sliced_bytes(matrix: Array, free: tuple[tuple[int, int], ...]) -> Values:
    sizes = [stop - start for start, stop in free]
    if len(free) == 1:
        ((start, stop),) = free
        return Values(None, 1, np.ascontiguousarray(matrix[:, start:stop]).reshape(-1), sizes[0])
    parts = [matrix[:, start:stop] for start, stop in free]
    flat = np.concatenate(parts, axis=1).reshape(-1) if parts else np.empty(0, np.uint8)
    return Values(None, len(free), flat, np.tile(np.array(sizes, np.int64), len(matrix)))


def _matrix(block: Block, size: int) -> Array:
    shape, strides = (len(block), size), (size + AROUND, 1)
    start = int(block.starts[0])
    matrix: Array = np.ndarray(shape, np.uint8, block.data, start, strides)
    return matrix


def _same(columns: Array) -> bool:
    """Whether all rows are as the first."""
    return not columns.shape[1] or bool((columns == columns[0]).all())


def _last_of_each(record: Array) -> Array:
    """In a map the last entry of a name counts."""
    latest = np.full(int(record.max()) + 1, -1, np.int64)
    latest[record] = np.arange(len(record))
    return latest[latest >= 0]


def _scattered(block: Block, features: Entries, listed: Lists, kind: int) -> Values:
    rows = len(block)
    whole = len(features.record) == rows and bool((listed.kind != 0).all())
    present = None if whole else np.zeros(rows, bool)
    if present is not None:
        present[features.record[listed.kind != 0]] = True
    if kind == BYTES:
        owner, starts, sizes = items(block, features.record, listed)
        counts = np.bincount(owner, minlength=len(features.record))
        return Values(present, _spread(counts, features.record, rows), gather(block, starts, sizes), sizes)
    starts, sizes = packed(block, features.record, listed, unit=4 if kind == FLOAT else 1)
    line = gather(block, starts, sizes)
    if kind == FLOAT:
        return Values(present, _spread(sizes // 4, features.record, rows), line.view("<f4"))
    flat, counts = _integers(line, sizes, features.record)
    return Values(present, _spread(counts, features.record, rows), flat)


def _integers(line: Array, sizes: Array, record: Array) -> tuple[Array, Array]:
    """The numbers in a line of bytes, and how many each record has in its share of the line."""
    if len(line) == len(sizes) and (sizes == 1).all() and (line < 0x80).all():
        return line.astype(np.int64), np.ones(len(sizes), np.int64)
    stops = np.cumsum(sizes)
    cut: Array = np.empty(0, np.int64)
    if len(line):
        cut = np.flatnonzero((sizes > 0) & (line[np.maximum(stops, 1) - 1] >= 0x80))
    if len(cut):
        raise Unusual(record[cut])
    try:
        flat, ends = varints.decode(line)
    except ValueError:
        raise Unusual(record) from None
    upto = np.searchsorted(ends, stops)
    return flat, np.diff(upto, prepend=0)


def _spread(counts: Array, record: Array, rows: int) -> Array:
    if len(record) == rows:
        return counts
    spread = np.zeros(rows, np.int64)
    spread[record] = counts
    return spread


def gather(block: Block, starts: Array, sizes: Array) -> Array:
    """Pieces of a block's data, one behind the other."""
    if not len(starts):
        return np.empty(0, np.uint8)
    width = int(sizes[0])
    if (sizes == width).all():
        if not width:
            return np.empty(0, np.uint8)
        together: Array = block.words(f"V{width}")[starts].view(np.uint8)
        return together
    total = int(sizes.sum())
    if total < _SHORT_BYTES * len(sizes):
        shift = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
        return block.array[shift + np.arange(total)]
    data, pairs = block.data, zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
    return np.frombuffer(b"".join([data[start:stop] for start, stop in pairs]), np.uint8)
