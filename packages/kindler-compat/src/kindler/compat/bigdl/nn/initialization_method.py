"""`bigdl.nn.initialization_method`: how weights begin, for `layer.set_init_method`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kindler.compat.bigdl.arguments import Configured, arguments, classes
from kindler.compat.bigdl.util.arrays import fill_uniform
from kindler.errors import ConfigError

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...  # the classes of the table


class InitializationMethod(Configured, takes=arguments()):
    """Base class; `fill` fills a parameter."""


class RandomUniform(InitializationMethod, takes=arguments("upper=None, lower=None")):
    """Between two limits, in BigDL's order; without them, `1 / sqrt(fan in)` on both sides of 0."""

    def setup(self) -> None:
        if (self.upper is None) != (self.lower is None):
            raise ConfigError("RandomUniform takes both limits or none.")
        limits = (self.lower, self.upper)
        self.limits = None if self.upper is None else (min(limits), max(limits))

    def fill(self, tensor: torch.Tensor) -> None:
        bound = 1 / math.sqrt(_fans(tensor)[0])
        fill_uniform(tensor, *(self.limits or (-bound, bound)))


class MsraFiller(InitializationMethod, takes=arguments("variance_norm_average=True")):
    """Normally distributed, with the variance `2 / n`; n is fan in, or the mean of fan in and fan out."""

    def setup(self) -> None:
        self.average = self.variance_norm_average

    def fill(self, tensor: torch.Tensor) -> None:
        fan_in, fan_out = _fans(tensor)
        count = (fan_in + fan_out) / 2 if self.average else fan_in
        tensor.normal_(0.0, math.sqrt(2 / count))


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


_TABLE: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "Zeros": lambda o, tensor: tensor.zero_(),
    "Ones": lambda o, tensor: tensor.fill_(1.0),
    "ConstInitMethod(value)": lambda o, tensor: tensor.fill_(o.value),
    "RandomNormal(mean, stdv)": lambda o, tensor: tensor.normal_(o.mean, o.stdv),
    # Uniform within `sqrt(6 / (fan in + fan out))`.
    "Xavier": lambda o, tensor: fill_uniform(tensor, -(bound := math.sqrt(6 / sum(_fans(tensor)))), bound),
    # The kernel of bilinear interpolation, for `SpatialFullConvolution`.
    "BilinearFiller": lambda o, tensor: tensor.copy_(
        (_tent(tensor.shape[-2])[:, None] * _tent(tensor.shape[-1])).expand_as(tensor)
    ),
}
_CLASSES = classes(__name__, InitializationMethod, _TABLE, "fill")
globals().update(_CLASSES)
__all__ = ["InitializationMethod", "MsraFiller", "RandomUniform", *_CLASSES]  # noqa: PLE0604 - names
