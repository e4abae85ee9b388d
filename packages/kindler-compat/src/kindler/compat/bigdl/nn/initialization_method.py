"""`bigdl.nn.initialization_method`: how weights begin, for `layer.set_init_method`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kindler.compat.bigdl.arguments import Configured, arguments
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


class InitializationMethod(Configured, takes=arguments()):
    """Base class."""

    def fill(self, tensor: torch.Tensor) -> None:
        """Fill a parameter."""
        raise NotImplementedError


def _method(name: str, fill: Callable[[Any, torch.Tensor], object], takes: str = "") -> Any:
    body = {"__module__": __name__, "fill": fill}
    return type(name, (InitializationMethod,), body, takes=arguments(takes))


Zeros = _method("Zeros", lambda self, tensor: tensor.zero_())
Ones = _method("Ones", lambda self, tensor: tensor.fill_(1.0))
ConstInitMethod = _method("ConstInitMethod", lambda self, tensor: tensor.fill_(self.value), "value")
RandomNormal = _method(
    "RandomNormal", lambda self, tensor: tensor.normal_(self.mean, self.stdv), "mean, stdv"
)


class RandomUniform(InitializationMethod, takes=arguments("upper=None, lower=None")):
    """Between two limits, in BigDL's order; without them, `1 / sqrt(fan in)` on both sides of 0."""

    def setup(self) -> None:
        if (self.upper is None) != (self.lower is None):
            raise ConfigError("RandomUniform takes both limits or none.")
        limits = (self.lower, self.upper)
        self.limits = None if self.upper is None else (min(limits), max(limits))

    def fill(self, tensor: torch.Tensor) -> None:
        bound = 1 / math.sqrt(_fans(tensor)[0])
        low, high = self.limits or (-bound, bound)
        fill_uniform(tensor, low, high)


class Xavier(InitializationMethod):
    """Uniform within `sqrt(6 / (fan in + fan out))`."""

    def fill(self, tensor: torch.Tensor) -> None:
        bound = math.sqrt(6 / sum(_fans(tensor)))
        fill_uniform(tensor, -bound, bound)


class MsraFiller(InitializationMethod, takes=arguments("variance_norm_average=True")):
    """Normally distributed, with the variance `2 / n`; n is fan in, or the mean of fan in and fan out."""

    def setup(self) -> None:
        self.average = self.variance_norm_average

    def fill(self, tensor: torch.Tensor) -> None:
        fan_in, fan_out = _fans(tensor)
        count = (fan_in + fan_out) / 2 if self.average else fan_in
        tensor.normal_(0.0, math.sqrt(2 / count))


class BilinearFiller(InitializationMethod):
    """The kernel of bilinear interpolation, for `SpatialFullConvolution`."""

    def fill(self, tensor: torch.Tensor) -> None:
        height, width = tensor.shape[-2:]
        tensor.copy_((_tent(height)[:, None] * _tent(width)).expand_as(tensor))


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
