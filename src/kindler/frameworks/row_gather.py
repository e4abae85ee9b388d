"""`all_gather` for numpy arrays: the rows of all ranks, with gradients that flow back to each.

Gradients are weighted by each rank's share of the step, so the step is that of the mean of all ranks' losses.
Backward passes meet in the reverse order of forward passes, which is why ranks must gather alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kindler.collective import Array, Collective
from kindler.errors import ConfigError


class RowGather:
    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._calls = 0

    def begin(self) -> None:
        self._calls = 0

    def agree(self, rows: int, what: str) -> list[int]:
        """Returns the row count of each rank; `what` describes all else that must be the same."""
        self._calls += 1
        mine = np.zeros((self._collective.size, 2), np.int64)
        mine[self._collective.rank] = rows, zlib.crc32(f"{self._calls} {what}".encode())
        [table] = self._collective.sum([mine])
        if len(set(table[:, 1].tolist())) > 1:
            raise ConfigError(
                f"workers called all_gather with different tensors: call {self._calls} of this step is {what}"
                " here, and another worker has another dtype, other dimensions after the first, or no"
                " gradient.\nHint: do not let what only one worker knows decide what is gathered."
            )
        return [int(count) for count in table[:, 0]]

    def rows(self, own: Array, counts: Sequence[int]) -> Array:
        whole = np.zeros((sum(counts), *own.shape[1:]), own.dtype)
        whole[self._place(counts)] = own
        if not whole.size:
            return whole
        [summed] = self._collective.sum([whole.reshape(-1).view(np.uint8)])
        joined: Array = summed.view(own.dtype).reshape(whole.shape)
        return joined

    def returned(self, gradient: Array, counts: Sequence[int], share: float) -> Array:
        if not gradient.size:
            return gradient[self._place(counts)]
        # Not a product where it counts for nothing: NaN times 0 is NaN.
        weighed = gradient * gradient.dtype.type(share) if share else np.zeros_like(gradient)
        own = self._collective.sum([weighed])[0][self._place(counts)]
        return own / own.dtype.type(share) if share else own

    def _place(self, counts: Sequence[int]) -> slice:
        start = sum(counts[: self._collective.rank])
        return slice(start, start + counts[self._collective.rank])


def refuse_to_gather(tensor: Any) -> Any:
    """For workers that do not compute the same part of a step at the same time."""
    raise ConfigError(
        "all_gather needs workers that synchronize in every step and compute it in one pass.\n"
        "Hint: strategy='allreduce' (or 'zero1', 'fsdp') with accumulation_steps=1, or workers=1."
    )
