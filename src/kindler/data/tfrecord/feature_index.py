"""Many Examples at once: where the features of each record are, and where their values.

All records advance together, one feature a step, so that the work is done by a few operations on arrays of
positions. Only the usual form of a record is read here (see `example`); records of another form are named
in `Unusual`. No value is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kindler.data.columns import Array
from kindler.data.tfrecord import varints
from kindler.data.tfrecord.framing import Block

_TAG = np.uint64(0xFF)
_BYTE = np.uint64(8)
_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)
_MASKS = np.array([(1 << (8 * size)) - 1 for size in range(9)], np.uint64)


class Unusual(Exception):
    """Records that are written in a form that is not read here, by their places in the block."""

    def __init__(self, records: Array) -> None:
        super().__init__(records)
        self.records = records


@dataclass(frozen=True, slots=True)
class Entries:
    """Every feature of every record; of one record in their order.

    Attributes:
        record: The place of its record in the block.
        key: Where its name starts, in the block's data.
        key_size: How long its name is.
        start: Where its values start: a Feature.
        stop: Where they end.
        order: They all, sorted by a mark of their names, so that one name's are found without a look at all.
        marks: The marks in this order.
    """

    record: Array
    key: Array
    key_size: Array
    start: Array
    stop: Array
    order: Array
    marks: Array

    def of(self, chosen: Array) -> Entries:
        """Some of them, of one name."""
        record, key, key_size = self.record[chosen], self.key[chosen], self.key_size[chosen]
        start, stop = self.start[chosen], self.stop[chosen]
        return Entries(record, key, key_size, start, stop, self.order[:0], self.marks[:0])

    def named(self, block: Block, name: bytes) -> Array:
        """Which of them have that name, in their order."""
        mark = _mark(name)
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
    """The list in each feature: its kind (0 where there is none) and where it is."""

    kind: Array
    start: Array
    stop: Array


def entries(block: Block) -> Entries:
    """Find the features of all records.

    Raises:
        Unusual: Some records have another form.
    """
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
    """The list inside each feature.

    Raises:
        Unusual: Some features are of another form.
    """
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
    """Where the bytes of packed numbers start, and how many there are; of lists of `unit` bytes a number."""
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
    """The values of lists of bytes: to which list each belongs, where it starts, how long it is."""
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
    """A number for each name: its first eight bytes, mixed with its last eight if it is longer."""
    marks: Array = words[key] & _MASKS[np.minimum(size, 8)]
    long = np.flatnonzero(size > 8)
    if len(long):
        marks[long] ^= words[key[long] + size[long] - 8] * _MIX
    return marks


def _mark(name: bytes) -> np.uint64:
    padded = np.frombuffer(name + bytes(8), np.uint8)
    place, size = np.zeros(1, np.int64), np.full(1, len(name))
    words: Array = np.ndarray((len(name) + 1,), "<u8", padded, 0, (1,))
    mark: np.uint64 = _marks(words, place, size)[0]
    return mark


def _field(words: Array, at: Array) -> tuple[Array, Array, Array]:
    """The tag of the field at each position, where its bytes start and how many they are."""
    word = words[at]
    size, taken = varints.lengths(word >> _BYTE)
    return word & _TAG, at + 1 + taken, size


def _refuse(records: Array) -> None:
    if len(records):
        raise Unusual(np.unique(records))
