"""`bigdl.nn.initialization_method`: how weights begin, for `layer.set_init_method`."""

from __future__ import annotations

import math

import torch
from torch import nn

from kindler.compat.bigdl.util.rng import fill_uniform
from kindler.errors import ConfigError

__all__ = [
    "BilinearFiller",
    "ConstInitMethod",
    "InitializationMethod",
    "MsraFiller",
    "Ones",
    "RandomNormal",
    "RandomUniform",
    "Xavier",
    "Zeros",
]


class InitializationMethod:
    """Base class."""

    def __init__(self, bigdl_type: str = "float") -> None: ...

    def fill(self, tensor: torch.Tensor) -> None:
        """Fill a parameter."""
        raise NotImplementedError


class Zeros(InitializationMethod):
    """0."""

    def fill(self, tensor: torch.Tensor) -> None:
        tensor.zero_()


class Ones(InitializationMethod):
    """1."""

    def fill(self, tensor: torch.Tensor) -> None:
        tensor.fill_(1.0)


class ConstInitMethod(InitializationMethod):
    """A number."""

    def __init__(self, value: float, bigdl_type: str = "float") -> None:
        self.value = float(value)

    def fill(self, tensor: torch.Tensor) -> None:
        tensor.fill_(self.value)


class RandomUniform(InitializationMethod):
    """Between two limits; without them, `1 / sqrt(fan in)` on both sides of 0.

    Args:
        upper: The upper limit.
        lower: The lower one; BigDL passes them in this order.
        bigdl_type: Without effect.
    """

    def __init__(
        self, upper: float | None = None, lower: float | None = None, bigdl_type: str = "float"
    ) -> None:
        if (upper is None) != (lower is None):
            raise ConfigError("RandomUniform takes both limits or none.")
        self.limits = None if upper is None or lower is None else (min(lower, upper), max(lower, upper))

    def fill(self, tensor: torch.Tensor) -> None:
        bound = 1 / math.sqrt(_fans(tensor)[0])
        low, high = self.limits or (-bound, bound)
        fill_uniform(tensor, low, high)


class RandomNormal(InitializationMethod):
    """Normally distributed."""

    def __init__(self, mean: float, stdv: float, bigdl_type: str = "float") -> None:
        self.mean, self.stdv = float(mean), float(stdv)

    def fill(self, tensor: torch.Tensor) -> None:
        tensor.normal_(self.mean, self.stdv)


class Xavier(InitializationMethod):
    """Uniform within `sqrt(6 / (fan in + fan out))`."""

    def fill(self, tensor: torch.Tensor) -> None:
        bound = math.sqrt(6 / sum(_fans(tensor)))
        fill_uniform(tensor, -bound, bound)


class MsraFiller(InitializationMethod):
    """Normally distributed, with the variance `2 / n`.

    Args:
        variance_norm_average: Whether n is the mean of fan in and fan out; otherwise it is fan in.
        bigdl_type: Without effect.
    """

    def __init__(self, variance_norm_average: bool = True, bigdl_type: str = "float") -> None:
        self.average = variance_norm_average

    def fill(self, tensor: torch.Tensor) -> None:
        fan_in, fan_out = _fans(tensor)
        count = (fan_in + fan_out) / 2 if self.average else fan_in
        tensor.normal_(0.0, math.sqrt(2 / count))


class BilinearFiller(InitializationMethod):
    """The kernel of bilinear interpolation, for `SpatialFullConvolution`."""

    def fill(self, tensor: torch.Tensor) -> None:
        height, width = tensor.shape[-2:]
        rows, columns = _tent(height), _tent(width)
        tensor.copy_((rows[:, None] * columns).expand_as(tensor))


def _tent(size: int) -> torch.Tensor:
    factor = math.ceil(size / 2)
    center = (2 * factor - 1 - factor % 2) / (2.0 * factor)
    return 1 - (torch.arange(size) / factor - center).abs()


def _fans(tensor: torch.Tensor) -> tuple[float, float]:
    """Fan in and fan out: of a bias its length, of a convolution those of all groups."""
    if tensor.dim() < 2:
        return float(tensor.numel()), float(tensor.numel())
    plain = tensor.flatten(0, 1) if tensor.dim() == 5 else tensor
    fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(plain)
    return float(fan_in), float(fan_out)
