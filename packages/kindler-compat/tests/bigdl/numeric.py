"""Gradients of numpy functions by differences, to compare those of torch with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

STEP = 1e-6


def gradients(function: Callable[..., Any], arrays: Sequence[Any], outward: Any) -> list[Any]:
    """The gradient of `sum(function(*arrays) * outward)` with respect to each array."""
    found = []
    for place, array in enumerate(arrays):
        gradient = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            sums = []
            for sign in (1, -1):
                moved = array.copy()
                moved[index] += sign * STEP
                changed = [moved if other == place else part for other, part in enumerate(arrays)]
                sums.append(np.sum(function(*changed) * outward))
            gradient[index] = (sums[0] - sums[1]) / (2 * STEP)
        found.append(gradient)
    return found
