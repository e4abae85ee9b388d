"""Layers that change the shape of their input, or take or reduce parts of it. Axes are counted from 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from kindler.compat.bigdl.nn.axes import axis_of, place_of
from kindler.compat.bigdl.nn.base import INTMAX, INTMIN, Layer
from kindler.errors import ConfigError

__all__ = [
    "Contiguous",
    "InferReshape",
    "Masking",
    "Max",
    "Mean",
    "Min",
    "Narrow",
    "Padding",
    "Replicate",
    "Reshape",
    "Reverse",
    "Select",
    "Squeeze",
    "Sum",
    "Transpose",
    "Unsqueeze",
    "View",
]


class Reshape(Layer):
    """The values in another shape.

    Args:
        size: The new shape of a row.
        batch_mode: Whether the first axis of the input is a batch. None: unless the input has just the
            values of one row, and more than one along its first axis.
        bigdl_type: Without effect.
    """

    def __init__(
        self, size: Sequence[int], batch_mode: bool | None = None, bigdl_type: str = "float"
    ) -> None:
        super().__init__(bigdl_type)
        self.size, self.batch_mode = tuple(int(length) for length in size), batch_mode

    def compute(self, value: Any) -> Any:
        alone = value.numel() == math.prod(self.size) and value.shape[0] != 1
        batch = not alone if self.batch_mode is None else self.batch_mode
        return value.reshape(value.shape[0], *self.size) if batch else value.reshape(self.size)


class View(Layer):
    """The values in another shape; -1 is a length that follows from the others.

    The first axis stays where it is a batch, also a batch of one row.

    Args:
        sizes: The new shape of a row.
        num_input_dims: Axes of a row; 0 finds out by the number of values.
        bigdl_type: Without effect.
    """

    def __init__(
        self, sizes: int | Sequence[int], num_input_dims: int = 0, bigdl_type: str = "float"
    ) -> None:
        super().__init__(bigdl_type)
        given = [sizes] if isinstance(sizes, int) else sizes
        self.sizes, self.num_input_dims = tuple(int(length) for length in given), num_input_dims

    def set_num_input_dims(self, num: int) -> View:
        """Set the number of axes of a row."""
        self.num_input_dims = num
        return self

    def compute(self, value: Any) -> Any:
        if self.num_input_dims:
            leading = value.shape[: max(0, value.dim() - self.num_input_dims)]
            return value.reshape(*([math.prod(leading)] if leading else []), *self.sizes)
        known = math.prod(length for length in self.sizes if length != -1)
        rows, left = value.shape[0], value.numel() // max(1, value.shape[0])
        fits = left % known == 0 if -1 in self.sizes else left == known
        if fits and value.dim() > 1:
            return value.reshape(rows, *self.sizes)
        return value.reshape(self.sizes if value.numel() == known or -1 in self.sizes else (-1, *self.sizes))


class InferReshape(Layer):
    """The values in another shape: 0 is the length that the input has there, -1 follows from the others."""

    def __init__(self, size: Sequence[int], batch_mode: bool = False, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.size, self.batch_mode = tuple(int(length) for length in size), batch_mode

    def compute(self, value: Any) -> Any:
        skipped = 1 if self.batch_mode else 0
        shape = [
            value.shape[place + skipped] if length == 0 else length for place, length in enumerate(self.size)
        ]
        return value.reshape(*value.shape[:skipped], *shape)


class Contiguous(Layer):
    """Its input, contiguous in memory."""

    def compute(self, value: Any) -> Any:
        return value.contiguous()


class Squeeze(Layer):
    """Without axes of length 1.

    Args:
        dim: The axis; None is all of them.
        num_input_dims: Axes of a row, where `dim` counts those.
        bigdl_type: Without effect.
    """

    def __init__(self, dim: int | None, num_input_dims: int = INTMIN, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.dim, self.num_input_dims = dim, num_input_dims

    def compute(self, value: Any) -> Any:
        if self.dim is not None:
            return value.squeeze(axis_of(self.dim, value, self.num_input_dims))
        if self.num_input_dims > 0 and value.dim() == self.num_input_dims + 1:
            return value.reshape(value.shape[0], *(length for length in value.shape[1:] if length != 1))
        return value.squeeze()


class Unsqueeze(Layer):
    """With a new axis of length 1 at a place."""

    def __init__(self, pos: int, num_input_dims: int = INTMIN, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.pos, self.num_input_dims = pos, num_input_dims

    def compute(self, value: Any) -> Any:
        batch = self.num_input_dims > 0 and value.dim() == self.num_input_dims + 1
        return value.unsqueeze(self.pos - 1 + batch)


class Transpose(Layer):
    """With axes exchanged, a pair at a time."""

    def __init__(self, permutations: Sequence[tuple[int, int]], bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.permutations = [(int(first), int(second)) for first, second in permutations]

    def compute(self, value: Any) -> Any:
        for first, second in self.permutations:
            value = value.transpose(axis_of(first, value), axis_of(second, value))
        return value


class Select(Layer):
    """One place of an axis, without the axis."""

    def __init__(self, dim: int, index: int, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.dim, self.index = dim, index

    def compute(self, value: Any) -> Any:
        axis = axis_of(self.dim, value)
        return value.select(axis, place_of(self.index, value.shape[axis]))


class Narrow(Layer):
    """A part of an axis.

    Args:
        dimension: The axis.
        offset: The first place of the part; negative numbers count from the last.
        length: Places; negative numbers reach to that place from the last.
        bigdl_type: Without effect.
    """

    def __init__(self, dimension: int, offset: int, length: int = 1, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.dimension, self.offset, self.length = dimension, offset, length

    def compute(self, value: Any) -> Any:
        axis = axis_of(self.dimension, value)
        first = place_of(self.offset, value.shape[axis])
        length = self.length if self.length > 0 else value.shape[axis] - first + self.length + 1
        return value.narrow(axis, first, length)


class Replicate(Layer):
    """With a new axis along which the input is repeated.

    Args:
        n_features: How often.
        dim: The place of the new axis.
        n_dim: Axes of a row, where `dim` counts those.
        bigdl_type: Without effect.
    """

    def __init__(self, n_features: int, dim: int = 1, n_dim: int = INTMAX, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.n_features, self.dim, self.n_dim = n_features, dim, n_dim

    def compute(self, value: Any) -> Any:
        axis = self.dim - 1 + (value.dim() > self.n_dim)
        shape = [*value.shape[:axis], self.n_features, *value.shape[axis:]]
        return value.unsqueeze(axis).expand(shape)


class Reverse(Layer):
    """With an axis in reverse order."""

    def __init__(self, dimension: int = 1, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.dimension = dimension

    def compute(self, value: Any) -> Any:
        return value.flip(axis_of(self.dimension, value))


class Padding(Layer):
    """An axis with a value before or after what is there.

    Args:
        dim: The axis of a row.
        pad: How many values; negative numbers put them before.
        n_input_dim: Axes of a row.
        value: The value.
        n_index: Where the values are put; only 1, the ends, is known here.
        bigdl_type: Without effect.
    """

    def __init__(
        self,
        dim: int,
        pad: int,
        n_input_dim: int,
        value: float = 0.0,
        n_index: int = 1,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        if n_index != 1:
            raise ConfigError(f"Padding: n_index must be 1; received {n_index}.")
        self.dim, self.pad, self.n_input_dim, self.value = dim, pad, n_input_dim, float(value)

    def compute(self, value: Any) -> Any:
        axis = axis_of(self.dim, value, self.n_input_dim)
        sides = [0, 0] * (value.dim() - axis - 1)
        return F.pad(value, [*sides, max(0, -self.pad), max(0, self.pad)], value=self.value)


class Masking(Layer):
    """Zeros at the steps of sequences whose features all have one value."""

    def __init__(self, mask_value: float, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.mask_value = float(mask_value)

    def compute(self, value: Any) -> Any:
        return value * (value != self.mask_value).any(-1, keepdim=True)


class Mean(Layer):
    """The mean along an axis.

    Args:
        dimension: The axis.
        n_input_dims: Axes of a row, where `dimension` counts those.
        squeeze: Whether the axis goes.
        bigdl_type: Without effect.
    """

    def __init__(
        self, dimension: int = 1, n_input_dims: int = -1, squeeze: bool = True, bigdl_type: str = "float"
    ) -> None:
        super().__init__(bigdl_type)
        self.dimension, self.n_input_dims, self.squeeze = dimension, n_input_dims, squeeze

    def compute(self, value: Any) -> Any:
        return value.mean(axis_of(self.dimension, value, self.n_input_dims), keepdim=not self.squeeze)


class Sum(Layer):
    """The sum along an axis; with `size_average`, the mean."""

    def __init__(
        self,
        dimension: int = 1,
        n_input_dims: int = -1,
        size_average: bool = False,
        squeeze: bool = True,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.dimension, self.n_input_dims = dimension, n_input_dims
        self.size_average, self.squeeze = size_average, squeeze

    def compute(self, value: Any) -> Any:
        reduce = torch.mean if self.size_average else torch.sum
        return reduce(value, axis_of(self.dimension, value, self.n_input_dims), keepdim=not self.squeeze)


class Max(Layer):
    """The largest value along an axis."""

    def __init__(self, dim: int, num_input_dims: int = INTMIN, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.dim, self.num_input_dims = dim, num_input_dims

    def compute(self, value: Any) -> Any:
        return value.max(axis_of(self.dim, value, self.num_input_dims)).values


class Min(Layer):
    """The smallest value along an axis."""

    def __init__(self, dim: int = 1, num_input_dims: int = INTMIN, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.dim, self.num_input_dims = dim, num_input_dims

    def compute(self, value: Any) -> Any:
        return value.min(axis_of(self.dim, value, self.num_input_dims)).values
