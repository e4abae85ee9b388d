"""How rows become steps: pure rules that every worker computes alike, without asking the others.

With N rows in all and T = ceil(N / batch size) steps, every step takes nearly N / T rows, from each
worker in proportion to what it has: every row is used exactly once, and all workers take the same
number of steps, whatever the partitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kindler.data.columns import Array
from kindler.errors import ConfigError

__all__ = ["order", "shares", "steps"]


def steps(total_rows: int, batch_size: int) -> int:
    """How many steps an epoch over `total_rows` rows has; the last batch may be short.

    >>> steps(10, 4)
    3
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: must be at least 1.")
    return -(-total_rows // batch_size)


def shares(counts: Sequence[int], steps: int) -> Iterator[Array]:
    """How many rows each rank brings to each step: in proportion to what it has, and all of it in the end.

    Every step has N / steps rows over all ranks, rounded down or up, so none is larger than the batch
    size and none is empty. Whole numbers only: all ranks compute the same.

    >>> [rows.tolist() for rows in shares([5, 2], 3)]
    [[2, 0], [1, 1], [2, 1]]
    """
    have = np.asarray(counts, np.int64)
    total, used = int(have.sum()), np.zeros_like(have)
    for step in range(steps):
        size = (step + 1) * total // steps - step * total // steps
        due = have * (step + 1) - used * steps  # what a rank should have brought by now, in 1/steps rows
        rows = np.maximum(due // steps, 0)
        rest = due - rows * steps
        short = size - int(rows.sum())
        if short > 0:
            rows[np.argsort(-rest, kind="stable")[:short]] += 1
        elif short < 0:  # some are ahead by a row, so others wait with theirs
            rows[np.argsort(np.where(rows > 0, rest, steps), kind="stable")[:-short]] -= 1
        used += rows
        yield rows


def order(rows: int, *, seed: int, epoch: int, rank: int) -> Array:
    """The order in which a worker takes its rows in an epoch: the same for the same arguments."""
    source = np.random.Philox(np.random.SeedSequence([seed, epoch, rank]))
    return np.random.Generator(source).permutation(rows)
