"""How rows become steps: pure rules that every worker computes alike, without asking the others.

With N rows in all and T = ceil(N / batch size) steps, each worker cuts its own rows into T nearly
equal pieces: every row is used exactly once, and all workers take the same number of steps,
whatever the partitions.
"""

from __future__ import annotations

import numpy as np

from kindler.data.columns import Array
from kindler.errors import ConfigError

__all__ = ["cut", "order", "steps"]


def steps(total_rows: int, batch_size: int) -> int:
    """How many steps an epoch over `total_rows` rows has; the last batch may be short.

    >>> steps(10, 4)
    3
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: must be at least 1.")
    return -(-total_rows // batch_size)


def cut(rows: int, steps: int, step: int) -> tuple[int, int]:
    """The range of a worker's own rows that belongs to `step`; empty when it has too few for all.

    >>> [cut(5, 3, step) for step in range(3)]
    [(0, 1), (1, 3), (3, 5)]
    """
    return step * rows // steps, (step + 1) * rows // steps


def order(rows: int, *, seed: int, epoch: int, rank: int) -> Array:
    """The order in which a worker takes its rows in an epoch: the same for the same arguments."""
    source = np.random.Philox(np.random.SeedSequence([seed, epoch, rank]))
    return np.random.Generator(source).permutation(rows)
