"""Convolutions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kindler.compat.bigdl.nn.base import Layer, uniform
from kindler.errors import ConfigError

__all__ = [
    "SpatialConvolution",
    "SpatialDilatedConvolution",
    "SpatialFullConvolution",
    "SpatialShareConvolution",
    "TemporalConvolution",
    "VolumetricConvolution",
]


class SpatialConvolution(Layer):
    """A convolution of images.

    The weight has the shape (n_group, n_output_plane / n_group, n_input_plane / n_group, kernel_h, kernel_w);
    with `data_format="NHWC"` it is (n_group, kernel_h, kernel_w, n_input_plane / n_group,
    n_output_plane / n_group).

    Args:
        n_input_plane: Channels of an image.
        n_output_plane: Channels of the output.
        kernel_w: Width of the kernel.
        kernel_h: Its height.
        stride_w: Steps along the width.
        stride_h: Steps along the height.
        pad_w: Zeros on each side; -1 pads so that the output has the size of the input over the stride.
        pad_h: Zeros above and below; -1 goes with `pad_w=-1`.
        n_group: Groups of channels that are computed separately.
        propagate_back: Whether the input gets a gradient.
        wRegularizer: Added to the gradient of the weight.
        bRegularizer: Added to that of the bias.
        init_weight: The weight to begin with.
        init_bias: The bias to begin with.
        init_grad_weight: Without effect.
        init_grad_bias: Without effect.
        with_bias: Whether there is a bias.
        data_format: "NCHW" or "NHWC".
        bigdl_type: Without effect.
    """

    def __init__(
        self,
        n_input_plane: int,
        n_output_plane: int,
        kernel_w: int,
        kernel_h: int,
        stride_w: int = 1,
        stride_h: int = 1,
        pad_w: int = 0,
        pad_h: int = 0,
        n_group: int = 1,
        propagate_back: bool = True,
        wRegularizer: Any = None,
        bRegularizer: Any = None,
        init_weight: Any = None,
        init_bias: Any = None,
        init_grad_weight: Any = None,
        init_grad_bias: Any = None,
        with_bias: bool = True,
        data_format: str = "NCHW",
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        if n_input_plane % n_group or n_output_plane % n_group:
            raise ConfigError(
                f"SpatialConvolution: n_group={n_group} must divide n_input_plane={n_input_plane} and"
                f" n_output_plane={n_output_plane}."
            )
        self.stride, self.kernel = (stride_h, stride_w), (kernel_h, kernel_w)
        self.pad, self.groups, self.propagate_back = (pad_h, pad_w), n_group, propagate_back
        self.channels_last = is_channels_last(data_format)
        ins, outs = n_input_plane // n_group, n_output_plane // n_group
        shape = (kernel_h, kernel_w, ins, outs) if self.channels_last else (outs, ins, kernel_h, kernel_w)
        self.weight = nn.Parameter(torch.empty(n_group, *shape))
        self.bias = nn.Parameter(torch.empty(n_output_plane)) if with_bias else None
        self.fan_in = kernel_h * kernel_w * n_input_plane
        self.initialize()
        self.start_with(weight=init_weight, bias=init_bias)
        self.regularize(weight=wRegularizer, bias=bRegularizer)
        self.without_effect(init_grad_weight=init_grad_weight, init_grad_bias=init_grad_bias)

    def initialize(self) -> None:
        uniform(self.weight, self.bias, bound=1 / math.sqrt(self.fan_in))

    def compute(self, value: Any) -> Any:
        value = (value if self.propagate_back else value.detach()).to(self.weight.dtype)
        weight: torch.Tensor = self.weight
        if self.channels_last:
            value, weight = value.movedim(-1, -3), weight.permute(0, 4, 3, 1, 2)
        value, pad = padded(value, self.kernel, self.stride, self.pad)
        made = F.conv2d(value, weight.flatten(0, 1), self.bias, self.stride, pad, groups=self.groups)
        return made.movedim(-3, -1) if self.channels_last else made


class SpatialShareConvolution(SpatialConvolution):
    """`SpatialConvolution`."""


class SpatialDilatedConvolution(Layer):
    """A convolution whose kernel has gaps; the weight has the shape (output, input, kh, kw)."""

    def __init__(
        self,
        n_input_plane: int,
        n_output_plane: int,
        kw: int,
        kh: int,
        dw: int = 1,
        dh: int = 1,
        pad_w: int = 0,
        pad_h: int = 0,
        dilation_w: int = 1,
        dilation_h: int = 1,
        wRegularizer: Any = None,
        bRegularizer: Any = None,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.stride, self.pad, self.dilation = (dh, dw), (pad_h, pad_w), (dilation_h, dilation_w)
        self.weight = nn.Parameter(torch.empty(n_output_plane, n_input_plane, kh, kw))
        self.bias = nn.Parameter(torch.empty(n_output_plane))
        self.initialize()
        self.regularize(weight=wRegularizer, bias=bRegularizer)

    def initialize(self) -> None:
        uniform(self.weight, self.bias, bound=1 / math.sqrt(self.weight[0].numel()))

    def compute(self, value: Any) -> Any:
        return F.conv2d(value, self.weight, self.bias, self.stride, self.pad, self.dilation)


class SpatialFullConvolution(Layer):
    """The transpose of a convolution; the weight has the shape (n_group, input, output, kh, kw) per group."""

    def __init__(
        self,
        n_input_plane: int,
        n_output_plane: int,
        kw: int,
        kh: int,
        dw: int = 1,
        dh: int = 1,
        pad_w: int = 0,
        pad_h: int = 0,
        adj_w: int = 0,
        adj_h: int = 0,
        n_group: int = 1,
        no_bias: bool = False,
        wRegularizer: Any = None,
        bRegularizer: Any = None,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.stride, self.pad, self.adjust, self.groups = (dh, dw), (pad_h, pad_w), (adj_h, adj_w), n_group
        shape = (n_group, n_input_plane // n_group, n_output_plane // n_group, kh, kw)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = None if no_bias else nn.Parameter(torch.empty(n_output_plane))
        self.fan_in = kh * kw * n_input_plane
        self.initialize()
        self.regularize(weight=wRegularizer, bias=bRegularizer)

    def initialize(self) -> None:
        uniform(self.weight, self.bias, bound=1 / math.sqrt(self.fan_in))

    def compute(self, value: Any) -> Any:
        return F.conv_transpose2d(
            value, self.weight.flatten(0, 1), self.bias, self.stride, self.pad, self.adjust, self.groups
        )


class TemporalConvolution(Layer):
    """A convolution along the steps of sequences of shape (rows, steps, input_frame_size).

    The weight has the shape (output_frame_size, kernel_w * input_frame_size).
    """

    def __init__(
        self,
        input_frame_size: int,
        output_frame_size: int,
        kernel_w: int,
        stride_w: int = 1,
        propagate_back: bool = True,
        weight_regularizer: Any = None,
        bias_regularizer: Any = None,
        init_weight: Any = None,
        init_bias: Any = None,
        init_grad_weight: Any = None,
        init_grad_bias: Any = None,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.kernel_w, self.stride_w, self.propagate_back = kernel_w, stride_w, propagate_back
        self.weight = nn.Parameter(torch.empty(output_frame_size, kernel_w * input_frame_size))
        self.bias = nn.Parameter(torch.empty(output_frame_size))
        self.initialize()
        self.start_with(weight=init_weight, bias=init_bias)
        self.regularize(weight=weight_regularizer, bias=bias_regularizer)
        self.without_effect(init_grad_weight=init_grad_weight, init_grad_bias=init_grad_bias)

    def initialize(self) -> None:
        uniform(self.weight, self.bias, bound=1 / math.sqrt(self.weight.shape[1]))

    def compute(self, value: Any) -> Any:
        value = (value if self.propagate_back else value.detach()).to(self.weight.dtype)
        kernel = self.weight.reshape(self.weight.shape[0], self.kernel_w, -1).transpose(1, 2)
        return F.conv1d(value.transpose(-1, -2), kernel, self.bias, self.stride_w).transpose(-1, -2)


class VolumetricConvolution(Layer):
    """A convolution of volumes (channels, time, height, width); the weight is (output, input, kt, kh, kw)."""

    def __init__(
        self,
        n_input_plane: int,
        n_output_plane: int,
        k_t: int,
        k_w: int,
        k_h: int,
        d_t: int = 1,
        d_w: int = 1,
        d_h: int = 1,
        pad_t: int = 0,
        pad_w: int = 0,
        pad_h: int = 0,
        with_bias: bool = True,
        wRegularizer: Any = None,
        bRegularizer: Any = None,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.stride, self.pad = (d_t, d_h, d_w), (pad_t, pad_h, pad_w)
        self.weight = nn.Parameter(torch.empty(n_output_plane, n_input_plane, k_t, k_h, k_w))
        self.bias = nn.Parameter(torch.empty(n_output_plane)) if with_bias else None
        self.initialize()
        self.regularize(weight=wRegularizer, bias=bRegularizer)

    def initialize(self) -> None:
        uniform(self.weight, self.bias, bound=1 / math.sqrt(self.weight[0].numel()))

    def compute(self, value: Any) -> Any:
        value, pad = padded(value, tuple(self.weight.shape[2:]), self.stride, self.pad)
        return F.conv3d(value, self.weight, self.bias, self.stride, pad)


def is_channels_last(data_format: str) -> bool:
    """Whether channels come last.

    Raises:
        ConfigError: It is neither "NCHW" nor "NHWC".
    """
    if data_format not in ("NCHW", "NHWC"):
        raise ConfigError(f"the format of images is 'NCHW' or 'NHWC'; received {data_format!r}.")
    return data_format == "NHWC"


def padded(
    value: torch.Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    pad: tuple[int, ...],
    fill: float = 0.0,
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The input and the padding that is left to do; -1 is done here, an odd one with more at the end."""
    if -1 not in pad:
        return value, pad
    sides: list[int] = []
    for size, width, step in zip(
        value.shape[-1 : -len(kernel) - 1 : -1], reversed(kernel), reversed(stride), strict=True
    ):
        missing = max(0, (math.ceil(size / step) - 1) * step + width - size)
        sides += [missing // 2, missing - missing // 2]
    return F.pad(value, sides, value=fill), (0,) * len(kernel)
