"""One meeting of all ranks: each brings bytes, and gets those of others, a sum or a mean. Pure.

Equal bytes travel once, since most of what ranks tell each other is the same for all of them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from kindler.engine.frames import Piece, encode

Wants: TypeAlias = Sequence[int] | Literal["all", "sum", "mean"]

_INT64 = np.dtype("<i8")
_HEAD = struct.Struct("<dQ")  # the weight, and how many bytes say what the arrays are


class Gathering:
    """Collects what `size` ranks bring; `answers` once all have come that are not lost."""

    def __init__(self, turn: int, size: int) -> None:
        self._turn = turn
        self._size = size
        self._brought: dict[int, bytes] = {}
        self._wants: dict[int, Wants] = {}

    def bring(self, rank: int, data: bytes, wants: Wants) -> None:
        """What `rank` brings, and whose bytes it wants.

        "sum" adds up arrays of 64-bit whole numbers, "mean" takes the mean of `weighted_arrays`.
        """
        self._brought[rank] = data
        self._wants[rank] = wants if isinstance(wants, str) else tuple(wants)

    def complete(self, lost: Collection[int] = ()) -> bool:
        """Whether all have come but those that are lost."""
        return len(self._brought.keys() | set(lost)) == self._size

    def answers(self, lost: Collection[int] = ()) -> dict[int, list[Piece]]:
        """For each rank that is left the pieces to send; those who want the same get the same.

        A rank that is lost counts for nothing, also if it came before: its part is empty.
        """
        for rank in lost:
            self._brought.pop(rank, None)
        made: dict[Wants, list[Piece]] = {}
        fields = {"turn": self._turn, **({"lost": sorted(lost)} if lost else {})}
        for wants in {self._wants[rank] for rank in self._brought}:
            frames = encode("gathered", pack_parts(self._parts(wants)), fields)
            made[wants] = [piece for frame in frames for piece in frame]
        return {rank: made[self._wants[rank]] for rank in sorted(self._brought)}

    def _parts(self, wants: Wants) -> list[bytes]:
        if wants == "sum":
            arrays = [np.frombuffer(data, _INT64) for _, data in sorted(self._brought.items())]
            return [np.sum(arrays, axis=0, dtype=_INT64).tobytes()]
        if wants == "mean":
            return [_mean([data for _, data in sorted(self._brought.items())])]
        ranks = range(self._size) if wants == "all" else wants
        return [self._brought.get(int(rank), b"") for rank in ranks]


def pack_parts(parts: Sequence[bytes]) -> tuple[bytes, bytes, bytes]:
    """Any number of byte strings as three: which distinct one each is, how long those are, and those."""
    distinct: dict[bytes, int] = {}
    which = [distinct.setdefault(part, len(distinct)) for part in parts]
    lengths = write_numbers([len(part) for part in distinct])
    # Nothing says that each is itself.
    return b"" if len(distinct) == len(parts) else write_numbers(which), lengths, b"".join(distinct)


def unpack_parts(which: bytes, lengths: bytes, data: bytes) -> list[bytes]:
    """What `pack_parts` made three of."""
    distinct, start = [], 0
    for length in read_numbers(lengths):
        distinct.append(data[start : start + length])
        start += length
    return [distinct[number] for number in read_numbers(which)] if which else distinct


def write_numbers(values: Sequence[int]) -> bytes:
    """Whole numbers of 64 bits as bytes."""
    return np.asarray(values, _INT64).tobytes()


def read_numbers(data: bytes) -> list[int]:
    """What `write_numbers` made bytes of."""
    numbers: list[int] = np.frombuffer(data, _INT64).tolist()
    return numbers


def weighted_arrays(arrays: Sequence[np.ndarray[Any, Any]], weight: float) -> bytes:
    """What a rank brings to a "mean": flat arrays of floats, and what they weigh."""
    kinds = json.dumps([(array.dtype.str, array.size) for array in arrays]).encode()
    return b"".join([_HEAD.pack(weight, len(kinds)), kinds, *(array.tobytes() for array in arrays)])


def read_arrays(data: bytes) -> list[np.ndarray[Any, Any]]:
    """The flat arrays that a "mean" is."""
    return list(_arrays(data))


def _arrays(data: bytes) -> Iterator[np.ndarray[Any, Any]]:
    start = _HEAD.size + _HEAD.unpack_from(data)[1]
    for kind, count in json.loads(data[_HEAD.size : start]):
        dtype = np.dtype(kind)
        yield np.frombuffer(data, dtype, count, start)
        start += count * dtype.itemsize


def _mean(parts: Sequence[bytes]) -> bytes:
    """The mean of what ranks brought, in double precision.

    A rank of weight 0 counts for nothing, whatever its arrays hold; zeros where no rank weighs anything.
    """
    weights = [float(_HEAD.unpack_from(part)[0]) for part in parts]
    whole, counting = sum(weights), [place for place, weight in enumerate(weights) if weight]
    means = []
    for mine in zip(*map(_arrays, parts), strict=True):
        total = np.zeros(mine[0].shape, np.promote_types(mine[0].dtype, np.float64))
        for place in counting:
            total += mine[place] * (weights[place] / whole)
        means.append(total.astype(mine[0].dtype))
    return weighted_arrays(means, whole)
