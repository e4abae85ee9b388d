"""Batches for tests of replicas: plain rows, cut over ranks as unevenly as a test likes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Rows:
    """A batch as replicas see it."""

    features: tuple[Array, ...]
    labels: tuple[Array, ...]
    rows: int
    global_rows: int
    where: Callable[[int], int | str] | None = None


def batch(x: Array, y: Array, start: int = 0, stop: int | None = None) -> Rows:
    """Rows [start, stop) of a global batch that is all of `x` and `y`."""
    part = slice(start, len(x) if stop is None else stop)
    return Rows((x[part].copy(),), (y[part].copy(),), len(x[part]), len(x))


def share(x: Array, y: Array, counts: Sequence[int], rank: int) -> Rows:
    """One rank's rows, of a global batch cut into `counts`."""
    start = sum(counts[:rank])
    return batch(x, y, start, start + counts[rank])
