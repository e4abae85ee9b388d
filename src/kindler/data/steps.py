"""How many steps an epoch has and where each begins: rules that every worker computes alike.

With N rows in all and T = ceil(N / batch size) steps, every step takes nearly N / T rows: every row is used
exactly once. Which rows those are is decided by `dealing`.
"""

from __future__ import annotations

from kindler.errors import ConfigError


def steps(total_rows: int, batch_size: int) -> int:
    """How many steps an epoch over `total_rows` rows has.

    >>> steps(10, 4)
    3
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: must be at least 1.")
    return -(-total_rows // batch_size)


def bound(step: int, total_rows: int, steps: int) -> int:
    """How many rows come before a step: all have N / steps rows, rounded down or up.

    >>> [bound(step, 10, 3) for step in range(4)]
    [0, 3, 6, 10]
    """
    return step * total_rows // steps
