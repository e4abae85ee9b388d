"""The numbers that layers draw: once they are seeded those of BigDL, so that the same seed gives its weights.

BigDL takes 32 bits of a Mersenne twister for each number. Without a seed, torch's generator draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

__all__ = ["RNG", "fill_uniform", "set_seed", "undrawn"]

_twister: list[np.random.RandomState] = []


class RNG:
    """BigDL's random numbers."""

    def __init__(self, bigdl_type: str = "float") -> None: ...

    def set_seed(self, seed: int) -> None:
        """Seed the numbers, also those that new layers draw their weights from."""
        set_seed(seed)

    def uniform(self, a: float, b: float, size: Sequence[int]) -> np.ndarray[Any, Any]:
        """An array of numbers between a and b."""
        numbers = _numbers(_twister[0] if _twister else np.random.RandomState(), int(np.prod(size)))
        return (numbers * (b - a) + a).astype(np.float32).reshape(size)


def set_seed(seed: int) -> None:
    """Seed the numbers that new layers draw their weights from."""
    import torch

    torch.manual_seed(seed)  # for what is not uniform
    _twister[:] = [np.random.RandomState(seed)]


def fill_uniform(tensor: Any, low: float, high: float) -> None:
    """Draw a tensor of torch between two limits."""
    if not _twister:
        tensor.uniform_(low, high)
        return
    numbers = _numbers(_twister[0], tensor.numel()) * (high - low) + low
    tensor.copy_(tensor.new_tensor(numbers).reshape(tensor.shape))


@contextmanager
def undrawn() -> Iterator[None]:
    """Numbers that are drawn within are drawn again after it."""
    states = [twister.get_state() for twister in _twister]
    yield
    for twister, state in zip(_twister, states, strict=True):
        twister.set_state(state)


def _numbers(twister: np.random.RandomState, count: int) -> np.ndarray[Any, Any]:
    return np.asarray(twister.randint(0, 2**32, size=count, dtype=np.uint64) / 2**32)
