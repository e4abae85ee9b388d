"""Activations, and functions of each element."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kindler.compat.bigdl.nn.base import Layer

__all__ = [
    "ELU",
    "Abs",
    "AddConstant",
    "Clamp",
    "Exp",
    "GradientReversal",
    "HardShrink",
    "HardSigmoid",
    "HardTanh",
    "LeakyReLU",
    "Log",
    "LogSigmoid",
    "LogSoftMax",
    "MulConstant",
    "Negative",
    "PReLU",
    "Power",
    "RReLU",
    "ReLU",
    "ReLU6",
    "Sigmoid",
    "SoftMax",
    "SoftMin",
    "SoftPlus",
    "SoftShrink",
    "SoftSign",
    "Sqrt",
    "Square",
    "Tanh",
    "TanhShrink",
    "Threshold",
]


class ReLU(Layer):
    """`max(0, x)`."""

    def __init__(self, ip: bool = False, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)

    def compute(self, value: Any) -> Any:
        return F.relu(value)


class ReLU6(Layer):
    """`min(max(0, x), 6)`."""

    def __init__(self, inplace: bool = False, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)

    def compute(self, value: Any) -> Any:
        return F.relu6(value)


class Tanh(Layer):
    """The hyperbolic tangent."""

    def compute(self, value: Any) -> Any:
        return torch.tanh(value)


class Sigmoid(Layer):
    """`1 / (1 + exp(-x))`."""

    def compute(self, value: Any) -> Any:
        return torch.sigmoid(value)


class LogSigmoid(Layer):
    """The logarithm of the sigmoid."""

    def compute(self, value: Any) -> Any:
        return F.logsigmoid(value)


class HardSigmoid(Layer):
    """`min(max(0, 0.2 x + 0.5), 1)`."""

    def compute(self, value: Any) -> Any:
        return (0.2 * value + 0.5).clamp(0.0, 1.0)


class HardTanh(Layer):
    """x between two limits."""

    def __init__(
        self,
        min_value: float = -1.0,
        max_value: float = 1.0,
        inplace: bool = False,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.min_value, self.max_value = float(min_value), float(max_value)

    def compute(self, value: Any) -> Any:
        return value.clamp(self.min_value, self.max_value)


class Clamp(HardTanh):
    """x between two limits."""

    def __init__(self, min: float, max: float, bigdl_type: str = "float") -> None:  # noqa: A002 - BigDL's names
        super().__init__(min, max, bigdl_type=bigdl_type)


class ELU(Layer):
    """x, and `alpha * (exp(x) - 1)` below 0."""

    def __init__(self, alpha: float = 1.0, inplace: bool = False, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.alpha = float(alpha)

    def compute(self, value: Any) -> Any:
        return F.elu(value, self.alpha)


class LeakyReLU(Layer):
    """x, and `negval * x` below 0."""

    def __init__(self, negval: float = 0.01, inplace: bool = False, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.negval = float(negval)

    def compute(self, value: Any) -> Any:
        return F.leaky_relu(value, self.negval)


class PReLU(Layer):
    """x, and a learned multiple of x below 0: one for all, or one for each of `n_output_plane` channels."""

    def __init__(self, n_output_plane: int = 0, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.weight = nn.Parameter(torch.empty(max(1, n_output_plane)))
        self.initialize()

    def initialize(self) -> None:
        nn.init.constant_(self.weight, 0.25)

    def compute(self, value: Any) -> Any:
        return F.prelu(value, self.weight)


class RReLU(Layer):
    """x, and below 0 a multiple of x that is drawn anew in training, and the mean of the limits otherwise."""

    def __init__(
        self,
        lower: float = 1.0 / 8,
        upper: float = 1.0 / 3,
        inplace: bool = False,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.lower, self.upper = float(lower), float(upper)

    def compute(self, value: Any) -> Any:
        return F.rrelu(value, self.lower, self.upper, self.training)


class SoftMax(Layer):
    """Shares of `exp(x)`: of the elements of a row, or of the channels at each place of an image."""

    def compute(self, value: Any) -> Any:
        return F.softmax(value, _channel_axis(value))


class SoftMin(Layer):
    """The SoftMax of -x."""

    def compute(self, value: Any) -> Any:
        return F.softmin(value, _channel_axis(value))


class LogSoftMax(Layer):
    """The logarithm of SoftMax."""

    def compute(self, value: Any) -> Any:
        return F.log_softmax(value, _channel_axis(value))


class SoftPlus(Layer):
    """`log(1 + exp(beta x)) / beta`."""

    def __init__(self, beta: float = 1.0, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.beta = float(beta)

    def compute(self, value: Any) -> Any:
        return F.softplus(value, self.beta)


class SoftSign(Layer):
    """`x / (1 + |x|)`."""

    def compute(self, value: Any) -> Any:
        return F.softsign(value)


class SoftShrink(Layer):
    """x without `lambda` of its absolute value, and 0 where that is more than there is."""

    def __init__(self, the_lambda: float = 0.5, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.the_lambda = float(the_lambda)

    def compute(self, value: Any) -> Any:
        return F.softshrink(value, self.the_lambda)


class HardShrink(Layer):
    """x, and 0 where its absolute value is at most `lambda`."""

    def __init__(self, the_lambda: float = 0.5, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.the_lambda = float(the_lambda)

    def compute(self, value: Any) -> Any:
        return F.hardshrink(value, self.the_lambda)


class TanhShrink(Layer):
    """`x - tanh(x)`."""

    def compute(self, value: Any) -> Any:
        return F.tanhshrink(value)


class Threshold(Layer):
    """x where it is above `th`, otherwise `v`."""

    def __init__(self, th: float = 1e-6, v: float = 0.0, ip: bool = False, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.th, self.v = float(th), float(v)

    def compute(self, value: Any) -> Any:
        return F.threshold(value, self.th, self.v)


class Abs(Layer):
    """The absolute value."""

    def compute(self, value: Any) -> Any:
        return value.abs()


class Negative(Layer):
    """-x."""

    def __init__(self, inplace: bool = False, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)

    def compute(self, value: Any) -> Any:
        return -value


class Exp(Layer):
    """`exp(x)`."""

    def compute(self, value: Any) -> Any:
        return value.exp()


class Log(Layer):
    """The natural logarithm."""

    def compute(self, value: Any) -> Any:
        return value.log()


class Sqrt(Layer):
    """The square root."""

    def compute(self, value: Any) -> Any:
        return value.sqrt()


class Square(Layer):
    """The square."""

    def compute(self, value: Any) -> Any:
        return value.square()


class Power(Layer):
    """`(shift + scale * x) ** power`."""

    def __init__(
        self, power: float, scale: float = 1.0, shift: float = 0.0, bigdl_type: str = "float"
    ) -> None:
        super().__init__(bigdl_type)
        self.power, self.scale, self.shift = float(power), float(scale), float(shift)

    def compute(self, value: Any) -> Any:
        return (self.shift + self.scale * value) ** self.power


class AddConstant(Layer):
    """x plus a number."""

    def __init__(self, constant_scalar: float, inplace: bool = False, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.constant_scalar = float(constant_scalar)

    def compute(self, value: Any) -> Any:
        return value + self.constant_scalar


class MulConstant(Layer):
    """x times a number."""

    def __init__(self, scalar: float, inplace: bool = False, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.scalar = float(scalar)

    def compute(self, value: Any) -> Any:
        return value * self.scalar


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any, factor: float) -> Any:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -ctx.factor * gradients[0], None


class GradientReversal(Layer):
    """x; its gradient is multiplied by `-lambda`."""

    def __init__(self, the_lambda: float = 1.0, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.the_lambda = float(the_lambda)

    def compute(self, value: Any) -> Any:
        return _Reversed.apply(value, self.the_lambda)  # type: ignore[no-untyped-call]


def _channel_axis(value: torch.Tensor) -> int:
    """Rows alone or in a batch: the last axis; images: that of channels."""
    return {1: 0, 2: 1, 3: 0}.get(value.dim(), 1)
