"""BigDL's axes, counted from 1, as torch's."""

from __future__ import annotations

import torch

from kindler.errors import ConfigError

__all__ = ["axis_of", "place_of"]


def axis_of(dimension: int, tensor: torch.Tensor, n_input_dims: int = -1) -> int:
    """torch's number of an axis.

    Args:
        dimension: Counted from 1; negative numbers count from the last.
        tensor: What has the axes.
        n_input_dims: The axes of one row, where `dimension` counts those; a tensor with one more is a batch.
    """
    if dimension == 0:
        raise ConfigError("axes are counted from 1; received 0.")
    axis = dimension - 1 if dimension > 0 else tensor.dim() + dimension
    if n_input_dims > 0 and dimension > 0 and tensor.dim() == n_input_dims + 1:
        axis += 1
    if not 0 <= axis < tensor.dim():
        raise ConfigError(f"there is no axis {dimension} in a tensor of shape {tuple(tensor.shape)}.")
    return axis


def place_of(index: int, size: int) -> int:
    """A place counted from 1, or negative from the last, as one counted from 0."""
    place = index - 1 if index > 0 else size + index
    if index == 0 or not 0 <= place < size:
        raise ConfigError(f"there is no place {index} among {size}; places are counted from 1.")
    return place
