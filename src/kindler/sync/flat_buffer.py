"""Arrays of several shapes and dtypes in one piece of memory, for a socket or a mapping to carry as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kindler.collective import Array

_ALIGN_BYTES = 64


class FlatLayout:
    """Where each of some arrays lies in a buffer that holds all of them.

    Args:
        arrays: Their shapes and dtypes count.

    Attributes:
        nbytes: The size of the buffer.

    >>> layout = FlatLayout([np.zeros(3, np.float32), np.zeros((2, 2))])
    >>> layout.nbytes, [view.shape for view in layout.views(np.zeros(layout.nbytes, np.uint8))]
    (96, [(3,), (2, 2)])
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._kinds = [(array.shape, array.dtype) for array in arrays]
        self._starts: list[int] = []
        end = 0
        for array in arrays:
            self._starts.append(-(-end // _ALIGN_BYTES) * _ALIGN_BYTES)
            end = self._starts[-1] + array.nbytes
        self.nbytes = end

    @property
    def description(self) -> list[Any]:
        """Shapes and dtypes as JSON; equal for equal layouts."""
        return [[list(shape), dtype.str] for shape, dtype in self._kinds]

    def views(self, buffer: Any) -> list[Array]:
        """The arrays that lie in `buffer`, which has at least `nbytes` bytes; they are not copied."""
        return [
            np.ndarray(shape, dtype, buffer, offset=start)
            for (shape, dtype), start in zip(self._kinds, self._starts, strict=True)
        ]
