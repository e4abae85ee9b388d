"""Arrays as tensors and back, for `forward` and `backward` of layers and criteria called with arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from kindler.compat.bigdl.util.arrays import JTensor

__all__ = ["are_arrays", "gradients_of", "leaves", "to_arrays", "to_tensors"]


def are_arrays(value: Any) -> bool:
    """Whether these are arrays, numbers or `JTensor`s, rather than tensors of torch."""
    if isinstance(value, list | tuple):
        return any(are_arrays(part) for part in value)
    return isinstance(value, np.ndarray | np.generic | JTensor | int | float)


def to_tensors(value: Any, *, tracked: bool = False) -> Any:
    """The value with tensors instead of arrays: float32, as all of BigDL's are.

    Args:
        value: An array, a number, a `JTensor`, or a list of these.
        tracked: Whether gradients with respect to the tensors are wanted.
    """
    if isinstance(value, list | tuple):
        return [to_tensors(part, tracked=tracked) for part in value]
    if isinstance(value, JTensor):
        value = value.to_ndarray()
    tensor = (
        value if isinstance(value, torch.Tensor) else torch.tensor(np.asarray(value), dtype=torch.float32)
    )
    return tensor.detach().clone().requires_grad_() if tracked else tensor


def to_arrays(value: Any) -> Any:
    """The value with arrays instead of tensors."""
    if isinstance(value, list | tuple):
        return [to_arrays(part) for part in value]
    if isinstance(value, Mapping):
        return {name: to_arrays(part) for name, part in value.items()}
    return value.detach().cpu().numpy()


def gradients_of(value: Any) -> Any:
    """What backward left at the tensors of `to_tensors(tracked=True)`, as arrays; zeros where nothing."""
    if isinstance(value, list):
        return [gradients_of(part) for part in value]
    gradient = value.grad if value.grad is not None else torch.zeros_like(value)
    return to_arrays(gradient)


def leaves(value: Any) -> list[torch.Tensor]:
    """All tensors of nested lists, in order."""
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]
