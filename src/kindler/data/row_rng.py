"""Random numbers of one row: decided by the seed, the epoch and the row's number, and by nothing else.

Which worker has the row, in which batch it comes and what was drawn before do not matter: the numbers are
those of a counter (Philox) that every row of every epoch has a stretch of to itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from kindler.data.columns import Array

_ROWS = 0x726F7773  # what sets these numbers apart from others of the same seed


class RowRandom:
    """A generator that is set to one row after the other: far cheaper than a new one for each."""

    def __init__(self, seed: int) -> None:
        sequence = np.random.SeedSequence([seed & (2**63 - 1), _ROWS])
        self._key = np.asarray(sequence.generate_state(2, np.uint64), np.uint64)
        self._counter = np.zeros(4, np.uint64)
        self._state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": self._counter, "key": self._key},
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        self._bits = np.random.Philox(0)
        self._generator = np.random.Generator(self._bits)

    def of(self, epoch: int, number: int) -> np.random.Generator:
        """The generator of this row; what it gave for the row before is another one no longer."""
        self._counter[2], self._counter[3] = number & (2**64 - 1), epoch
        self._bits.state = self._state  # which is copied
        return self._generator


class RowRandoms(Sequence[np.random.Generator]):
    """The generators of the rows of a batch, each made when it is asked for."""

    def __init__(self, seed: int, epoch: int, numbers: Array) -> None:
        self._seed, self._epoch, self._numbers = seed, epoch, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def in_turn(self) -> Iterator[np.random.Generator]:
        """One generator, set to each row in turn: quicker, for whoever is done with a row before the next."""
        random = RowRandom(self._seed)
        return (random.of(self._epoch, number) for number in self._numbers.tolist())

    @overload
    def __getitem__(self, row: int) -> np.random.Generator: ...
    @overload
    def __getitem__(self, row: slice) -> RowRandoms: ...
    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return RowRandoms(self._seed, self._epoch, self._numbers[row])
        return RowRandom(self._seed).of(self._epoch, int(self._numbers[row]))
