"""The order of an epoch in which rows of similar length come together, every row exactly once.

A stretch of many steps is taken in the order that an epoch has anyway, sorted by length, cut into steps and
the steps shuffled. All of it follows from the seed, the epoch and the lengths, which every worker knows of
all rows: the steps are the same for all numbers of workers that have the same lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kindler.data.columns import Array
from kindler.data.row_order import Rounds, generator

_STEPS = 64  # that are sorted together: enough for batches of nearly one length, and still a random sample
_BUCKETS = 0x6275636B


class Bucketed(Rounds):
    """`Rounds` with rows of similar length in each step.

    Args:
        counts: The rows of every lane.
        rank: Whose rows are asked for.
        size: How many workers share the lanes.
        seed: With the epoch, decides the order.
        lengths: How long each row is, those of a lane together.
        bounds: Where each step begins, and the last one ends.
    """

    def __init__(
        self, counts: Sequence[int], *, rank: int, size: int, seed: int, lengths: Array, bounds: Array
    ) -> None:
        super().__init__(counts, rank=rank, size=size, seed=seed)
        self._everybody = Rounds(counts, rank=0, size=1, seed=seed)
        self._bucket_seed, self._lengths, self._step_bounds = seed, lengths, bounds
        lanes = np.repeat(np.arange(len(counts)), counts)
        self._is_own = lanes % size == rank
        self._own_place = np.cumsum(self._is_own) - 1
        self._made: tuple[int, Array, Array] | None = None

    def sequence(self, epoch: int) -> Array:
        """All rows in the order of an epoch, as places among those of all lanes, one lane after another."""
        return self._of(epoch)[1]

    def order(self, epoch: int) -> Array:
        rows = self.sequence(epoch)
        own: Array = self._own_place[rows[self._is_own[rows]]]
        return own

    def own_before(self, place: Array | int, epoch: int) -> Array:
        before: Array = self._of(epoch)[2][np.asarray(place)]
        return before

    def may_miss(self, bounds: Array) -> bool:
        """Chance alone decides how the rows of a step are shared."""
        return self._size > 1

    def _of(self, epoch: int) -> tuple[int, Array, Array]:
        """The epoch, its sequence, and how many rows of this worker come before each place; one is kept."""
        kept = self._made  # another thread may ask for another epoch
        if kept is None or kept[0] != epoch:
            rows = self._sorted(self._everybody.order(epoch), epoch)
            before = np.concatenate([[0], np.cumsum(self._is_own[rows])])
            kept = self._made = (epoch, rows, before)
        return kept

    def _sorted(self, rows: Array, epoch: int) -> Array:
        bounds, result = self._step_bounds, np.empty_like(rows)
        steps = len(bounds) - 1
        for number, first in enumerate(range(0, steps, _STEPS)):
            last = min(first + _STEPS, steps)
            part = rows[bounds[first] : bounds[last]]
            part = part[np.argsort(self._lengths[part], kind="stable")]
            taken = 0
            random = generator(self._bucket_seed, epoch & 0xFFFFFFFF, _BUCKETS, number)
            for step in first + random.permutation(last - first):
                start, stop = int(bounds[step]), int(bounds[step + 1])
                result[start:stop] = part[taken : taken + stop - start]
                taken += stop - start
        return result
