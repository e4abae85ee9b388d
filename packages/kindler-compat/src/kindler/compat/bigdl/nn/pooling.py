"""Pooling, padding and resizing of images and sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.nn import functional as F

from kindler.compat.bigdl.nn.base import Layer
from kindler.compat.bigdl.nn.convolution import is_channels_last, padded

__all__ = [
    "ResizeBilinear",
    "SpatialAveragePooling",
    "SpatialMaxPooling",
    "SpatialZeroPadding",
    "TemporalMaxPooling",
    "UpSampling1D",
    "UpSampling2D",
    "VolumetricMaxPooling",
]


class SpatialMaxPooling(Layer):
    """The largest value of each window of an image.

    Args:
        kw: Width of the window.
        kh: Its height.
        dw: Steps along the width; -1 is the width of the window.
        dh: Steps along the height; -1 is its height.
        pad_w: Padding on each side; -1 pads so that the output has the size of the input over the step.
        pad_h: Padding above and below.
        to_ceil: Whether sizes are rounded up.
        format: "NCHW" or "NHWC".
        bigdl_type: Without effect.
    """

    def __init__(
        self,
        kw: int,
        kh: int,
        dw: int = -1,
        dh: int = -1,
        pad_w: int = 0,
        pad_h: int = 0,
        to_ceil: bool = False,
        format: str = "NCHW",  # noqa: A002 - BigDL's name
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.kernel, self.stride = (kh, kw), (kh if dh == -1 else dh, kw if dw == -1 else dw)
        self.pad, self.to_ceil, self.channels_last = (pad_h, pad_w), to_ceil, is_channels_last(format)

    def ceil(self) -> SpatialMaxPooling:
        """Round sizes up; returns the layer."""
        self.to_ceil = True
        return self

    def floor(self) -> SpatialMaxPooling:
        """Round sizes down."""
        self.to_ceil = False
        return self

    def compute(self, value: Any) -> Any:
        value = value.movedim(-1, -3) if self.channels_last else value
        value, pad = padded(value, self.kernel, self.stride, self.pad, fill=-math.inf)
        made = F.max_pool2d(value, self.kernel, self.stride, pad, ceil_mode=self.to_ceil)
        return made.movedim(-3, -1) if self.channels_last else made


class SpatialAveragePooling(Layer):
    """The mean of each window of an image.

    Args:
        kw: Width of the window.
        kh: Its height.
        dw: Steps along the width.
        dh: Steps along the height.
        pad_w: Padding on each side.
        pad_h: Padding above and below.
        global_pooling: Whether the window is the whole image.
        ceil_mode: Whether sizes are rounded up.
        count_include_pad: Whether padding counts in the mean.
        divide: Whether to divide by the number of values; otherwise it is their sum.
        format: "NCHW" or "NHWC".
        bigdl_type: Without effect.
    """

    def __init__(
        self,
        kw: int,
        kh: int,
        dw: int = 1,
        dh: int = 1,
        pad_w: int = 0,
        pad_h: int = 0,
        global_pooling: bool = False,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divide: bool = True,
        format: str = "NCHW",  # noqa: A002 - BigDL's name
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.kernel, self.stride, self.pad = (kh, kw), (dh, dw), (pad_h, pad_w)
        self.global_pooling, self.ceil_mode = global_pooling, ceil_mode
        self.count_include_pad, self.divide = count_include_pad, divide
        self.channels_last = is_channels_last(format)

    def compute(self, value: Any) -> Any:
        value = value.movedim(-1, -3) if self.channels_last else value
        kernel = tuple(value.shape[-2:]) if self.global_pooling else self.kernel
        stride = kernel if self.global_pooling else self.stride
        value, pad = padded(value, kernel, stride, self.pad)
        made = F.avg_pool2d(
            value,
            kernel,
            stride,
            pad,
            self.ceil_mode,
            self.count_include_pad,
            None if self.divide else 1,
        )
        return made.movedim(-3, -1) if self.channels_last else made


class TemporalMaxPooling(Layer):
    """The largest value of each window along the steps of sequences (rows, steps, features).

    Args:
        k_w: Steps of a window; -1 is all of them.
        d_w: Steps from one window to the next; -1 is `k_w`.
        bigdl_type: Without effect.
    """

    def __init__(self, k_w: int, d_w: int = -1, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.k_w, self.d_w = k_w, d_w

    def compute(self, value: Any) -> Any:
        width = value.shape[-2] if self.k_w == -1 else self.k_w
        made = F.max_pool1d(value.transpose(-1, -2), width, width if self.d_w == -1 else self.d_w)
        return made.transpose(-1, -2)


class VolumetricMaxPooling(Layer):
    """The largest value of each window of a volume (channels, time, height, width)."""

    def __init__(
        self,
        k_t: int,
        k_w: int,
        k_h: int,
        d_t: int,
        d_w: int,
        d_h: int,
        pad_t: int = 0,
        pad_w: int = 0,
        pad_h: int = 0,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.kernel, self.stride, self.pad = (k_t, k_h, k_w), (d_t, d_h, d_w), (pad_t, pad_h, pad_w)

    def compute(self, value: Any) -> Any:
        return F.max_pool3d(value, self.kernel, self.stride, self.pad)


class SpatialZeroPadding(Layer):
    """Zeros around an image; negative numbers cut off."""

    def __init__(
        self, pad_left: int, pad_right: int, pad_top: int, pad_bottom: int, bigdl_type: str = "float"
    ) -> None:
        super().__init__(bigdl_type)
        self.sides = (pad_left, pad_right, pad_top, pad_bottom)

    def compute(self, value: Any) -> Any:
        return F.pad(value, self.sides)


class UpSampling1D(Layer):
    """Every step of a sequence (rows, steps, features) so many times."""

    def __init__(self, length: int, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.length = length

    def compute(self, value: Any) -> Any:
        return value.repeat_interleave(self.length, 1)


class UpSampling2D(Layer):
    """Every row of an image `size[0]` times, every column `size[1]` times."""

    def __init__(self, size: Sequence[int], data_format: str = "nchw", bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.size, self.channels_last = tuple(size), is_channels_last(data_format.upper())

    def compute(self, value: Any) -> Any:
        height = -3 if self.channels_last else -2
        return value.repeat_interleave(self.size[0], height).repeat_interleave(self.size[1], height + 1)


class ResizeBilinear(Layer):
    """Images of another size, interpolated.

    Args:
        output_height: The height.
        output_width: The width.
        align_corner: Whether the corners of both images are the same values.
        data_format: "NCHW" or "NHWC".
        bigdl_type: Without effect.
    """

    def __init__(
        self,
        output_height: int,
        output_width: int,
        align_corner: bool = False,
        data_format: str = "NCHW",
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.size, self.align_corner = (output_height, output_width), align_corner
        self.channels_last = is_channels_last(data_format)

    def compute(self, value: Any) -> Any:
        value = value.movedim(-1, -3) if self.channels_last else value
        made = F.interpolate(value, self.size, mode="bilinear", align_corners=self.align_corner)
        return made.movedim(-3, -1) if self.channels_last else made
