"""Arrays, JTensors and tables of them, as tensors and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from kindler.compat.bigdl.util.arrays import JTensor


def are_arrays(value: Any) -> bool:
    """Whether these are arrays, numbers or `JTensor`s, rather than tensors of torch."""
    if isinstance(value, list | tuple):
        return any(are_arrays(part) for part in value)
    return isinstance(value, np.ndarray | np.generic | JTensor | int | float)


def to_tensors(value: Any, *, tracked: bool = False) -> Any:
    """Tensors instead of arrays: float32, as all of BigDL's are; `tracked` if gradients are wanted."""
    if isinstance(value, list | tuple):
        return [to_tensors(part, tracked=tracked) for part in value]
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(np.asarray(value), dtype=torch.float32)
    return value.detach().clone().requires_grad_() if tracked else value


def to_arrays(value: Any) -> Any:
    """Arrays instead of tensors."""
    if isinstance(value, list | tuple):
        return [to_arrays(part) for part in value]
    if isinstance(value, Mapping):
        return {name: to_arrays(part) for name, part in value.items()}
    return value.detach().cpu().numpy()


def gradients_of(value: Any) -> Any:
    """What backward left at the tensors of `to_tensors(tracked=True)`, as arrays; zeros where nothing."""
    if isinstance(value, list):
        return [gradients_of(part) for part in value]
    return to_arrays(value.grad if value.grad is not None else torch.zeros_like(value))


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]
