"""Parses many Examples at once.

All records advance together, one feature per step, with a few operations on arrays of positions. Only the
form that writers agree on is read. Protobuf allows others (unpacked numbers, fields in pieces, unknown
fields): such records are named in `UnusualError`, and `canonical` rewrites them one by one. `ragged` reads a
column of any records; `even` reads records that all have the same layout, byte for byte, where a column is a
slice of one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kindler_tfrecord import varints
from kindler_tfrecord.framing import AROUND, Array, Block
from kindler_tfrecord.schema import BYTES, FLOAT, INT64

_VARINT, _FIXED64, _LEN, _FIXED32 = 0, 1, 2, 5
_MASK = (1 << 64) - 1


class MalformedError(ValueError):
    """Bytes that are not a tf.train.Example."""


def canonical(record: bytes) -> bytes:
    features: dict[bytes, bytes] = {}
    for message in _messages(record):
        for entry in _messages(message):
            key, feature = b"", b""
            for number, wire, value in _fields(entry):
                if number == 1 and wire == _LEN:
                    key = value
                elif number == 2 and wire == _LEN:
                    feature += value  # the pieces of a message add up to it
            features[key] = feature
    entries = (_framed(0x0A, key) + _framed(0x12, _feature(data)) for key, data in features.items())
    return _framed(0x0A, b"".join(_framed(0x0A, entry) for entry in entries))


def _feature(data: bytes) -> bytes:
    kind, content = 0, b""
    for number, wire, value in _fields(data):
        if number in _LISTS and wire == _LEN:
            content = content + value if number == kind else value  # one of the three: the last one given
            kind = number
    return _framed(kind << 3 | _LEN, _LISTS[kind](content)) if kind else b""


def _bytes_list(data: bytes) -> bytes:
    return b"".join(_framed(0x0A, item) for item in _messages(data))


def _float_list(data: bytes) -> bytes:
    chunks = [value for number, wire, value in _fields(data) if number == 1 and wire in (_FIXED32, _LEN)]
    for value in chunks:
        if len(value) % 4:
            raise MalformedError(f"a list of floats has {len(value)} bytes")
    return _packed(chunks)


def _int64_list(data: bytes) -> bytes:
    numbers: list[bytes] = []
    for number, wire, value in _fields(data):
        if number == 1 and wire in (_VARINT, _LEN):
            position = 0
            while position < len(value):
                item, position = _varint(value, position)
                numbers.append(varints.one(item))
    return _packed(numbers)


def _packed(values: list[bytes]) -> bytes:
    content = b"".join(values)
    return _framed(0x0A, content) if content else b""


_LISTS = {BYTES: _bytes_list, FLOAT: _float_list, INT64: _int64_list}


def _framed(tag: int, data: bytes) -> bytes:
    return bytes((tag,)) + varints.one(len(data)) + data


def _messages(data: bytes) -> list[bytes]:
    return [value for number, wire, value in _fields(data) if number == 1 and wire == _LEN]


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, wire = tag >> 3, tag & 7
        if not number:
            raise MalformedError("a field has the number 0")
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield number, wire, varints.one(value)
            continue
        if wire == _LEN:
            size, position = _varint(data, position)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise MalformedError(f"a field has the unknown wire type {wire}")
        if size > len(data) - position:
            raise MalformedError("a field is longer than its message")
        yield number, wire, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for step in range(10):
        if position + step >= len(data):
            raise MalformedError("a number has no end")
        byte = data[position + step]
        value |= (byte & 0x7F) << (7 * step)
        if byte < 0x80:
            return value & _MASK, position + step + 1
    raise MalformedError("a number has more than ten bytes")


_TAG = np.uint64(0xFF)
_BYTE = np.uint64(8)
_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)
_MASKS = np.array([(1 << (8 * size)) - 1 for size in range(9)], np.uint64)


class UnusualError(Exception):
    """Records in a form that is not read here, by their places in the block."""

    def __init__(self, records: Array) -> None:
        super().__init__(records)
        self.records = records


@dataclass(frozen=True, slots=True)
class Entries:
    """Features of one record keep their order. `key` and `start` are offsets in the data. `order` sorts by
    a hash of the names (`marks`), to find a name without scanning all."""

    record: Array
    key: Array
    key_size: Array
    start: Array
    stop: Array
    order: Array
    marks: Array

    def of(self, chosen: Array) -> Entries:
        record, key, key_size = self.record[chosen], self.key[chosen], self.key_size[chosen]
        start, stop = self.start[chosen], self.stop[chosen]
        return Entries(record, key, key_size, start, stop, self.order[:0], self.marks[:0])

    def names(self, block: Block) -> list[bytes]:
        pairs = zip(self.key.tolist(), self.key_size.tolist(), strict=True)
        return [block.data[start : start + size] for start, size in pairs]

    def named(self, block: Block, name: bytes) -> Array:
        words: Array = np.ndarray((len(name) + 1,), "<u8", name + bytes(8), 0, (1,))
        mark = _marks(words, np.zeros(1, np.int64), np.full(1, len(name)))[0]
        low, high = np.searchsorted(self.marks, mark), np.searchsorted(self.marks, mark, side="right")
        entries: Array = self.order[low:high]
        entries = entries[self.key_size[entries] == len(name)]
        if len(name) <= 8 or not len(entries):
            return entries
        width = len(name)
        whole = block.words(f"V{width}")[self.key[entries]].view(np.uint8).reshape(-1, width)
        whole_name: Array = entries[(whole == np.frombuffer(name, np.uint8)).all(axis=1)]
        return whole_name


@dataclass(frozen=True, slots=True)
class Lists:
    kind: Array
    start: Array
    stop: Array


def entries(block: Block) -> Entries:
    words = block.words()
    last = len(words) - 1
    ends = block.starts + block.sizes
    tag, position, size = _field(words, block.starts)
    fine = (block.sizes == 0) | ((tag == 0x0A) & (position + size == ends))
    live = np.flatnonzero(fine & (position < ends))
    odd = [np.flatnonzero(~fine)]
    at, end = position[live], ends[live]
    steps: list[tuple[Array, ...]] = []
    while len(live):
        tag, body, size = _field(words, at)
        stop = body + size
        key_tag, key, key_size = _field(words, np.minimum(body, last))
        feature = key + key_size
        feature_tag, start, feature_size = _field(words, np.minimum(feature, last))
        fine = (
            (tag == 0x0A) & (key_tag == 0x0A) & (feature_tag == 0x12)
            & (stop <= end) & (feature < stop) & (start + feature_size == stop)
        )  # fmt: skip
        if not fine.all():
            odd.append(live[~fine])
            live, end, stop = live[fine], end[fine], stop[fine]
            key, key_size, start = key[fine], key_size[fine], start[fine]
        steps.append((live, key, key_size, start, stop))
        more = stop < end
        if more.all():
            at = stop
        else:
            live, end, at = live[more], end[more], stop[more]
    _refuse(np.concatenate(odd))
    if not steps:
        none: Array = np.empty(0, np.int64)
        return Entries(none, none, none, none, none, none, np.empty(0, np.uint64))
    live, key, key_size, start, stop = (np.concatenate(parts) for parts in zip(*steps, strict=True))
    marks = _marks(words, key, key_size)
    order = np.argsort(marks, kind="stable")
    return Entries(live, key, key_size, start, stop, order, marks[order])


def lists(block: Block, features: Entries) -> Lists:
    tag, start, size = _field(block.words(), features.start)
    none = features.start == features.stop
    fine = none | ((start + size == features.stop) & ((tag == 0x0A) | (tag == 0x12) | (tag == 0x1A)))
    _refuse(features.record[~fine])
    kind = (tag >> np.uint64(3)).astype(np.int64)
    if none.any():
        kind = np.where(none, 0, kind)
        start = np.where(none, features.stop, start)
    return Lists(kind, start, features.stop)


def packed(block: Block, record: Array, listed: Lists, *, unit: int) -> tuple[Array, Array]:
    """Start and size in bytes of packed numbers, of `unit` bytes each."""
    tag, start, size = _field(block.words(), listed.start)
    none = listed.start == listed.stop
    fine = none | ((tag == 0x0A) & (start + size == listed.stop))
    if unit > 1:
        fine &= none | (size % unit == 0)
    _refuse(record[~fine])
    if none.any():
        return np.where(none, listed.start, start), np.where(none, 0, size)
    return start, size


def items(block: Block, record: Array, listed: Lists) -> tuple[Array, Array, Array]:
    """(list, start, size) of each value in lists of bytes."""
    words = block.words()
    last = len(words) - 1
    live = np.flatnonzero(listed.start < listed.stop)
    at, end = listed.start[live], listed.stop[live]
    steps: list[tuple[Array, Array, Array]] = []
    while len(live):
        tag, start, size = _field(words, np.minimum(at, last))
        stop = start + size
        fine = (tag == 0x0A) & (stop <= end)
        _refuse(record[live[~fine]])
        steps.append((live, start, size))
        more = stop < end
        live, at, end = live[more], stop[more], end[more]
    if not steps:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
    if len(steps) == 1:
        return steps[0]
    owner, start, size = (np.concatenate(parts) for parts in zip(*steps, strict=True))
    order = np.argsort(owner, kind="stable")
    return owner[order], start[order], size[order]


def _marks(words: Array, key: Array, size: Array) -> Array:
    marks: Array = words[key] & _MASKS[np.minimum(size, 8)]
    long = np.flatnonzero(size > 8)
    if len(long):
        marks[long] ^= words[key[long] + size[long] - 8] * _MIX
    return marks


def _field(words: Array, at: Array) -> tuple[Array, Array, Array]:
    """(tag, start, size) of the field at each position."""
    word = words[at]
    size, taken = varints.lengths(word >> _BYTE)
    return word & _TAG, at + 1 + taken, size


def _refuse(records: Array) -> None:
    if len(records):
        raise UnusualError(np.unique(records))


_SHORT_BYTES = 24  # pieces below this are gathered byte by byte, longer ones one by one
_FEWEST_ROWS = 16  # not worth a layout


@dataclass(frozen=True, slots=True)
class Values:
    """`counts` may be one number for all records; `present` None means all. `flat` has the numbers, or the
    bytes of all strings, whose lengths are `sizes`."""

    present: Array | None
    counts: Array | int
    flat: Array
    sizes: Array | None = None


class WrongKindError(Exception):
    def __init__(self, record: int, kind: int) -> None:
        super().__init__(record, kind)
        self.record, self.kind = record, kind


def ragged(block: Block, all_entries: Entries, name: bytes, kind: int | None) -> tuple[int, Values] | None:
    """None if no record has it; `kind` None takes that of the first record, or raises `WrongKindError`."""
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
        raise WrongKindError(int(features.record[at]), int(listed.kind[at]))
    return kind, _scattered(block, features, listed, kind)


def even(block: Block, wanted: Mapping[bytes, int]) -> dict[bytes, Values] | None:
    """None unless all records have the layout of the first; names that the first lacks are left out."""
    rows = len(block)
    size = int(block.sizes[0]) if rows else 0
    if rows < _FEWEST_ROWS or not size or not (block.sizes == size).all():
        return None
    layout = _layout(block.head(1), wanted)
    if layout is None:
        return None
    matrix: Array = np.ndarray((rows, size), np.uint8, block.data, int(block.starts[0]), (size + AROUND, 1))
    position = 0
    for start, stop in [*sorted(span for spans in layout.values() for span in spans), (size, size)]:
        if not _same(matrix[:, position:start]):
            return None
        position = stop
    columns: dict[bytes, Values] = {}
    for name in layout.keys() & wanted.keys():
        values = _sliced([matrix[:, start:stop] for start, stop in layout[name]], wanted[name], rows)
        if values is None:
            return None
        columns[name] = values
    return columns


def _layout(first: Block, wanted: Mapping[bytes, int]) -> dict[bytes, list[tuple[int, int]]] | None:
    """From where to where the values of each feature are; of those not wanted, the whole feature."""
    layout: dict[bytes, list[tuple[int, int]]] = {}
    record: Array = np.zeros(1, np.int64)
    try:
        features = entries(first)
        listed = lists(first, features)
        for i, name in enumerate(features.names(first)):
            kind = wanted.get(name)
            own = Lists(listed.kind[i : i + 1], listed.start[i : i + 1], listed.stop[i : i + 1])
            if name in layout:
                return None
            if kind is None:
                starts, sizes = (
                    features.start[i : i + 1],
                    features.stop[i : i + 1] - features.start[i : i + 1],
                )
            elif own.kind[0] == 0 or (own.start[0] < own.stop[0] and own.kind[0] != kind):
                return None
            elif kind == BYTES:
                _, starts, sizes = items(first, record, own)
            else:
                starts, sizes = packed(first, record, own, unit=4 if kind == FLOAT else 1)
            starts = starts - first.starts[0]
            layout[name] = list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))
    except UnusualError:
        return None
    return layout


def _sliced(parts: list[Array], kind: int, rows: int) -> Values | None:
    if kind == BYTES:
        flat = np.concatenate(parts, axis=1).reshape(-1) if parts else np.empty(0, np.uint8)
        sizes = np.array([part.shape[1] for part in parts], np.int64)
        return Values(None, len(parts), flat, np.tile(sizes, rows))
    (part,) = parts
    line = np.ascontiguousarray(part).reshape(-1)
    if kind == FLOAT:
        return Values(None, part.shape[1] // 4, line.view("<f4"))
    more = part & 0x80
    if not _same(more) or more[0, -1:].any():
        return None
    try:
        flat, _ = varints.decode(line)
    except ValueError:
        return None
    return Values(None, len(flat) // rows, flat)


def _same(columns: Array) -> bool:
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
    """The numbers in a line of varints, and how many each record has."""
    if len(line) == len(sizes) and (sizes == 1).all() and (line < 0x80).all():
        return line.astype(np.int64), np.ones(len(sizes), np.int64)
    stops = np.cumsum(sizes)
    cut: Array = np.empty(0, np.int64)
    if len(line):
        cut = np.flatnonzero((sizes > 0) & (line[np.maximum(stops, 1) - 1] >= 0x80))
    if len(cut):
        raise UnusualError(record[cut])
    try:
        flat, ends = varints.decode(line)
    except ValueError:
        raise UnusualError(record) from None
    upto = np.searchsorted(ends, stops)
    return flat, np.diff(upto, prepend=0)


def _spread(counts: Array, record: Array, rows: int) -> Array:
    if len(record) == rows:
        return counts
    spread = np.zeros(rows, np.int64)
    spread[record] = counts
    return spread


def gather(block: Block, starts: Array, sizes: Array) -> Array:
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
