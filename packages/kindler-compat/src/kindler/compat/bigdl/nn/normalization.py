"""Normalization, dropout and noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kindler.compat.bigdl.nn.base import Layer
from kindler.compat.bigdl.nn.convolution import is_channels_last

__all__ = [
    "BatchNormalization",
    "Dropout",
    "GaussianDropout",
    "GaussianNoise",
    "Normalize",
    "SpatialBatchNormalization",
    "SpatialCrossMapLRN",
    "SpatialDropout1D",
    "SpatialDropout2D",
]


class BatchNormalization(Layer):
    """Rows minus their mean over the standard deviation of a batch; in evaluation, those of training.

    Args:
        n_output: Numbers of a row.
        eps: Added to the variance.
        momentum: How much of the running statistics a batch replaces.
        affine: Whether there are a weight and a bias.
        init_weight: The weight to begin with; None is ones.
        init_bias: The bias to begin with; None is zeros.
        init_grad_weight: Without effect.
        init_grad_bias: Without effect.
        bigdl_type: Without effect.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor
    channels_last = False

    def __init__(
        self,
        n_output: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        init_weight: Any = None,
        init_bias: Any = None,
        init_grad_weight: Any = None,
        init_grad_bias: Any = None,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.eps, self.momentum = float(eps), float(momentum)
        self.weight = nn.Parameter(torch.ones(n_output)) if affine else None
        self.bias = nn.Parameter(torch.zeros(n_output)) if affine else None
        self.register_buffer("running_mean", torch.zeros(n_output))
        self.register_buffer("running_var", torch.ones(n_output))
        self.start_with(weight=init_weight, bias=init_bias)
        self.without_effect(init_grad_weight=init_grad_weight, init_grad_bias=init_grad_bias)

    def initialize(self) -> None:
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)
        self.running_mean.zero_()
        self.running_var.fill_(1.0)

    def set_running_mean(self, running_mean: Any) -> BatchNormalization:
        """Set the mean of evaluation."""
        self.running_mean.copy_(torch.as_tensor(running_mean))
        return self

    def set_running_std(self, running_std: Any) -> BatchNormalization:
        """Set the variance of evaluation, which BigDL calls so."""
        self.running_var.copy_(torch.as_tensor(running_std))
        return self

    def compute(self, value: Any) -> Any:
        value = value.movedim(-1, 1) if self.channels_last else value
        made = F.batch_norm(
            value,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum,
            self.eps,
        )
        return made.movedim(1, -1) if self.channels_last else made


class SpatialBatchNormalization(BatchNormalization):
    """`BatchNormalization` of the channels of images."""

    def __init__(
        self,
        n_output: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        init_weight: Any = None,
        init_bias: Any = None,
        init_grad_weight: Any = None,
        init_grad_bias: Any = None,
        data_format: str = "NCHW",
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(
            n_output,
            eps,
            momentum,
            affine,
            init_weight,
            init_bias,
            init_grad_weight,
            init_grad_bias,
            bigdl_type,
        )
        self.channels_last = is_channels_last(data_format)


class SpatialCrossMapLRN(Layer):
    """Each value over a power of the squares of the channels around it.

    Args:
        size: Channels that are added up.
        alpha: Their weight.
        beta: The power.
        k: Added to the sum.
        data_format: "NCHW" or "NHWC".
        bigdl_type: Without effect.
    """

    def __init__(
        self,
        size: int = 5,
        alpha: float = 1.0,
        beta: float = 0.75,
        k: float = 1.0,
        data_format: str = "NCHW",
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.size, self.alpha, self.beta, self.k = size, float(alpha), float(beta), float(k)
        self.channels_last = is_channels_last(data_format)

    def compute(self, value: Any) -> Any:
        value = value.movedim(-1, 1) if self.channels_last else value
        made = F.local_response_norm(value, self.size, self.alpha, self.beta, self.k)
        return made.movedim(1, -1) if self.channels_last else made


class Normalize(Layer):
    """Rows over their p-norm."""

    def __init__(self, p: float, eps: float = 1e-10, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.p, self.eps = float(p), float(eps)

    def compute(self, value: Any) -> Any:
        axis = 1 if value.dim() > 1 else 0
        return value / (value.norm(self.p, axis, keepdim=True) + self.eps)


class Dropout(Layer):
    """In training, zeros at random.

    Args:
        init_p: The share of zeros.
        inplace: Without effect.
        scale: Whether the others are divided by `1 - init_p` in training; otherwise all are multiplied by it
            in evaluation.
        bigdl_type: Without effect.
    """

    def __init__(
        self, init_p: float = 0.5, inplace: bool = False, scale: bool = True, bigdl_type: str = "float"
    ) -> None:
        super().__init__(bigdl_type)
        self.init_p, self.scale = float(init_p), scale

    def set_p(self, p: float) -> Dropout:
        """Set the share of zeros."""
        self.init_p = float(p)
        return self

    def compute(self, value: Any) -> Any:
        made = F.dropout(value, self.init_p, self.training)
        return made if self.scale else made * (1 - self.init_p)


class GaussianDropout(Layer):
    """In training, values times random numbers around 1 whose variance is `rate / (1 - rate)`."""

    def __init__(self, rate: float, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.rate = float(rate)

    def compute(self, value: Any) -> Any:
        if not self.training:
            return value
        return value * (1 + (self.rate / (1 - self.rate)) ** 0.5 * torch.randn_like(value))


class GaussianNoise(Layer):
    """In training, values plus random numbers of this standard deviation."""

    def __init__(self, stddev: float, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.stddev = float(stddev)

    def compute(self, value: Any) -> Any:
        return value + self.stddev * torch.randn_like(value) if self.training else value


class SpatialDropout1D(Layer):
    """In training, zeros instead of whole features of sequences (rows, steps, features)."""

    def __init__(self, init_p: float = 0.5, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.init_p = float(init_p)

    def compute(self, value: Any) -> Any:
        return F.dropout1d(value.transpose(-1, -2), self.init_p, self.training).transpose(-1, -2)


class SpatialDropout2D(Layer):
    """In training, zeros instead of whole channels of images."""

    def __init__(self, init_p: float = 0.5, data_format: str = "NCHW", bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.init_p, self.channels_last = float(init_p), is_channels_last(data_format.upper())

    def compute(self, value: Any) -> Any:
        value = value.movedim(-1, -3) if self.channels_last else value
        made = F.dropout2d(value, self.init_p, self.training)
        return made.movedim(-3, -1) if self.channels_last else made
