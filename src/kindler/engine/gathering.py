"""One meeting of all ranks: each brings bytes, and gets those of the ranks it asks for. Pure.

Equal bytes travel once, since most of what ranks tell each other is the same for all of them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from kindler.engine.frames import Piece, encode

__all__ = ["Gathering", "pack_parts", "unpack_parts"]


class Gathering:
    """Collects what `size` ranks bring; `answers` once all have come."""

    def __init__(self, turn: int, size: int) -> None:
        self._turn = turn
        self._size = size
        self._brought: dict[int, bytes] = {}
        self._wants: dict[int, Sequence[int] | None] = {}

    def bring(self, rank: int, data: bytes, wants: Sequence[int] | None) -> None:
        """What `rank` brings, and whose bytes it wants: None is everybody's."""
        self._brought[rank] = data
        self._wants[rank] = wants

    @property
    def complete(self) -> bool:
        return len(self._brought) == self._size

    def answers(self) -> list[list[Piece]]:
        """For each rank the pieces to send; those who want the same get the same."""
        made: dict[tuple[int, ...] | None, list[Piece]] = {}
        answers = []
        for rank in range(self._size):
            wants = self._wants[rank]
            key = None if wants is None else tuple(wants)
            if key not in made:
                parts = [self._brought[other] for other in (range(self._size) if key is None else key)]
                frames = encode("gathered", pack_parts(parts), {"turn": self._turn})
                made[key] = [piece for frame in frames for piece in frame]
            answers.append(made[key])
        return answers


def pack_parts(parts: Sequence[bytes]) -> tuple[bytes, bytes, bytes]:
    """Any number of byte strings as three: which distinct one each is, how long those are, and those."""
    distinct: dict[bytes, int] = {}
    which = [distinct.setdefault(part, len(distinct)) for part in parts]
    return _numbers(which), _numbers([len(part) for part in distinct]), b"".join(distinct)


def unpack_parts(which: bytes, lengths: bytes, data: bytes) -> list[bytes]:
    """What `pack_parts` made three of."""
    distinct, start = [], 0
    for length in _read_numbers(lengths):
        distinct.append(data[start : start + length])
        start += length
    return [distinct[number] for number in _read_numbers(which)]


def _numbers(values: Sequence[int]) -> bytes:
    numbers = array("Q", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _read_numbers(data: bytes) -> list[int]:
    numbers = array("Q", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
