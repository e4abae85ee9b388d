"""Protobuf varints, many at a time: 7 bits per byte, lowest first; the high bit marks continuation."""

from __future__ import annotations

import numpy as np

from kindler_tfrecord.framing import Array

HUGE = 1 << 50  # what `lengths` answers where no length ends within seven bytes: more than any file has
_MORE = np.uint64(0x80)
_LOW = np.uint64(0x7F)
_STOPS = np.uint64(0x0080_8080_8080_8080)
_ALL_STOPS = np.uint64(0x8080_8080_8080_8080)
_MAX_BYTES = 10


def one(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def lengths(words: Array) -> tuple[Array, Array | int]:
    """The varint in the low seven bytes of each word (HUGE if it does not end there), and its size."""
    if not (words & _MORE).any():
        return (words & _LOW).astype(np.int64), 1
    stops = ~words & _STOPS
    lowest = stops & (~stops + np.uint64(1))
    values = _squeezed(words & (lowest - np.uint64(1)), 7).astype(np.int64)
    values[lowest == 0] = HUGE
    return values, np.frexp(lowest.astype(np.float64))[1].astype(np.int64) >> 3


def sizes(values: Array) -> Array:
    """Bytes per varint; negative numbers take ten."""
    unsigned = values.astype(np.int64, copy=False).view(np.uint64)
    lengths = np.ones(len(unsigned), np.int64)
    top = int(unsigned.max(initial=0))
    for step in range(1, _MAX_BYTES):
        if top >> (7 * step) == 0:
            break
        lengths += unsigned >= np.uint64(1 << (7 * step))
    return lengths


def encode(values: Array) -> tuple[Array, Array]:
    taken = sizes(values)
    unsigned = values.astype(np.int64, copy=False).view(np.uint64)
    longest = int(taken.max(initial=1))
    if longest == 1:
        return unsigned.astype(np.uint8), taken
    starts = np.cumsum(taken) - taken
    line = np.empty(int(taken.sum()), np.uint8)
    for step in range(longest):
        long_enough = taken > step
        part = (unsigned[long_enough] >> np.uint64(7 * step)).astype(np.uint8) & np.uint8(0x7F)
        part[taken[long_enough] > step + 1] |= np.uint8(0x80)
        line[starts[long_enough] + step] = part
    return line, taken


def decode(line: Array) -> tuple[Array, Array]:
    """The numbers, and where each ends; raises ValueError for a number of more than ten bytes."""
    ends = np.flatnonzero(line < 0x80)
    if len(ends) == len(line):
        return line.astype(np.int64), ends
    starts = np.empty_like(ends)
    starts[:1], starts[1:] = 0, ends[:-1] + 1
    longest = int((ends - starts).max()) + 1
    if longest > _MAX_BYTES:
        raise ValueError(f"a number of {longest} bytes")
    padded = np.concatenate((line, np.zeros(8, np.uint8)))
    words: Array = np.ndarray((len(line),), "<u8", padded, 0, (1,))[starts]
    stops = ~words & _ALL_STOPS
    lowest = stops & (~stops + np.uint64(1))
    values = _squeezed(words & (lowest - np.uint64(1)), min(longest, 8))
    if longest > 8:
        for step in (8, 9):
            long_enough = np.flatnonzero(ends - starts >= step)
            byte = line[starts[long_enough] + step].astype(np.uint64) & _LOW
            values[long_enough] |= byte << np.uint64(7 * step)
    return values.view(np.int64), ends


def _squeezed(words: Array, count: int) -> Array:
    values: Array = words & _LOW
    for step in range(1, count):
        values |= (words >> np.uint64(step)) & np.uint64(0x7F << (7 * step))
    return values
