"""Any number of rows through a model that was made for one number of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kindler.serve.signature import Array, Arrays

__all__ = ["in_fixed_rows"]


def in_fixed_rows(call: Callable[[Arrays], Arrays], inputs: Arrays, size: int | None) -> Arrays:
    """What `call` gives, if it is called with `size` rows each time; with all at once if that is None.

    The last call is filled up with the last row, and what comes of that is cut off.
    """
    rows = len(next(iter(inputs.values())))
    if size is None or rows == size:
        return call(inputs)
    pieces = [
        call({name: _filled(array[first : first + size], size) for name, array in inputs.items()})
        for first in range(0, rows, size)
    ]
    return {name: np.concatenate([piece[name] for piece in pieces])[:rows] for name in pieces[0]}


def _filled(array: Array, size: int) -> Array:
    if len(array) == size:
        return array
    return np.concatenate([array, np.repeat(array[-1:], size - len(array), axis=0)])
