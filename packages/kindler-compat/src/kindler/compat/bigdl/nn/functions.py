"""Layers without weights: activations, pooling, noise, and what takes, joins or reshapes tensors.

A row has the name, the output as a function of the layer and its input, and the arguments of the constructor.
Axes and places are counted from 1; negative ones count from the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch.nn import functional as F

from kindler.compat.bigdl.arguments import INTMAX, arguments
from kindler.compat.bigdl.nn.base import Layer, layer
from kindler.errors import ConfigError


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
    if dimension > 0 and is_batch(tensor, n_input_dims):
        axis += 1
    if not 0 <= axis < tensor.dim():
        raise ConfigError(f"there is no axis {dimension} in a tensor of shape {tuple(tensor.shape)}.")
    return axis


def is_batch(tensor: torch.Tensor, n_input_dims: int) -> bool:
    """Whether a tensor has one axis more than a row, whose axes may be unknown: not above 0."""
    return n_input_dims > 0 and tensor.dim() == n_input_dims + 1


def place_of(index: int, size: int) -> int:
    """A place counted from 1, or negative from the last, as one counted from 0."""
    place = index - 1 if index > 0 else size + index
    if index == 0 or not 0 <= place < size:
        raise ConfigError(f"there is no place {index} among {size}; places are counted from 1.")
    return place


def is_channels_last(data_format: str) -> bool:
    """Whether it is "NHWC" rather than "NCHW"."""
    if data_format.upper() not in ("NCHW", "NHWC"):
        raise ConfigError(f"the format of images is 'NCHW' or 'NHWC'; received {data_format!r}.")
    return data_format.upper() == "NHWC"


class ImageLayer(Layer):
    """A layer of images, which `of_images` gets with channels first, whatever `data_format` says."""

    def setup(self) -> None:
        is_channels_last(self.data_format)

    def of_images(self, images: Any) -> Any:
        """The output for images (..., channels, height, width)."""
        raise NotImplementedError

    def compute(self, value: Any) -> Any:
        if not is_channels_last(self.data_format):
            return self.of_images(value)
        return self.of_images(value.movedim(-1, -3)).movedim(-3, -1)


def image_layer(name: str, of_images: Callable[[Any, Any], Any], *texts: str) -> Any:
    """A class of layers of images that is a row of a table, see `layer`."""
    body = {"__module__": __name__, "of_images": of_images}
    return type(name, (ImageLayer,), body, takes=arguments(*texts))


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


# Functions of each element, and activations.

ReLU = layer("ReLU", lambda self, x: F.relu(x), "ip=False")
ReLU6 = layer("ReLU6", lambda self, x: F.relu6(x), "inplace=False")
Tanh = layer("Tanh", lambda self, x: torch.tanh(x))
Sigmoid = layer("Sigmoid", lambda self, x: torch.sigmoid(x))
LogSigmoid = layer("LogSigmoid", lambda self, x: F.logsigmoid(x))
HardSigmoid = layer("HardSigmoid", lambda self, x: (0.2 * x + 0.5).clamp(0.0, 1.0))
HardTanh = layer(
    "HardTanh",
    lambda self, x: x.clamp(self.min_value, self.max_value),
    "min_value=-1.0, max_value=1.0, inplace=False",
)
Clamp = layer("Clamp", lambda self, x: x.clamp(self.min, self.max), "min, max")
ELU = layer("ELU", lambda self, x: F.elu(x, self.alpha), "alpha=1.0, inplace=False")
LeakyReLU = layer("LeakyReLU", lambda self, x: F.leaky_relu(x, self.negval), "negval=0.01, inplace=False")
RReLU = layer(
    "RReLU",  # below 0 a multiple of x that is drawn anew in training, and the mean of the limits otherwise
    lambda self, x: F.rrelu(x, self.lower, self.upper, self.training),
    f"lower=0.125, upper={1 / 3}, inplace=False",
)
SoftMax = layer("SoftMax", lambda self, x: F.softmax(x, _channel_axis(x)))
SoftMin = layer("SoftMin", lambda self, x: F.softmin(x, _channel_axis(x)))
LogSoftMax = layer("LogSoftMax", lambda self, x: F.log_softmax(x, _channel_axis(x)))
SoftPlus = layer("SoftPlus", lambda self, x: F.softplus(x, self.beta), "beta=1.0")
SoftSign = layer("SoftSign", lambda self, x: F.softsign(x))
SoftShrink = layer("SoftShrink", lambda self, x: F.softshrink(x, self.the_lambda), "the_lambda=0.5")
HardShrink = layer("HardShrink", lambda self, x: F.hardshrink(x, self.the_lambda), "the_lambda=0.5")
TanhShrink = layer("TanhShrink", lambda self, x: F.tanhshrink(x))
Threshold = layer("Threshold", lambda self, x: F.threshold(x, self.th, self.v), "th=1e-6, v=0.0, ip=False")
Abs = layer("Abs", lambda self, x: x.abs())
Negative = layer("Negative", lambda self, x: -x, "inplace=False")
Exp = layer("Exp", lambda self, x: x.exp())
Log = layer("Log", lambda self, x: x.log())
Sqrt = layer("Sqrt", lambda self, x: x.sqrt())
Square = layer("Square", lambda self, x: x.square())
Power = layer(
    "Power", lambda self, x: (self.shift + self.scale * x) ** self.power, "power, scale=1.0, shift=0.0"
)
AddConstant = layer("AddConstant", lambda self, x: x + self.constant_scalar, "constant_scalar, inplace=False")
MulConstant = layer("MulConstant", lambda self, x: x * self.scalar, "scalar, inplace=False")
GradientReversal = layer("GradientReversal", lambda self, x: _reversed(x, self.the_lambda), "the_lambda=1.0")
Identity = layer("Identity", lambda self, x: x)


def _channel_axis(value: torch.Tensor) -> int:
    """Rows alone or in a batch: the last axis; images: that of channels."""
    return {1: 0, 2: 1, 3: 0}.get(value.dim(), 1)


class _Reversed(torch.autograd.Function):
    """x; its gradient is multiplied by `-factor`."""

    @staticmethod
    def forward(ctx: Any, value: Any, factor: float) -> Any:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -ctx.factor * gradients[0], None


_reversed: Callable[[Any, float], Any] = _Reversed.apply


# Noise in training.

GaussianNoise = layer(
    "GaussianNoise", lambda self, x: x + self.stddev * torch.randn_like(x) if self.training else x, "stddev"
)
GaussianDropout = layer(
    "GaussianDropout",
    lambda self, x: (
        x * (1 + (self.rate / (1 - self.rate)) ** 0.5 * torch.randn_like(x)) if self.training else x
    ),
    "rate",
)
SpatialDropout1D = layer(
    "SpatialDropout1D",  # whole features of sequences (rows, steps, features)
    lambda self, x: F.dropout1d(x.transpose(-1, -2), self.init_p, self.training).transpose(-1, -2),
    "init_p=0.5",
)
SpatialDropout2D = image_layer(
    "SpatialDropout2D",  # whole channels of images
    lambda self, x: F.dropout2d(x, self.init_p, self.training),
    'init_p=0.5, data_format="NCHW"',
)


class Dropout(Layer, takes=arguments("init_p=0.5, inplace=False, scale=True")):
    """In training, zeros at random, a share of `init_p`.

    With `scale` the others are divided by `1 - init_p` in training; otherwise all are multiplied by it in
    evaluation.
    """

    def set_p(self, p: float) -> Dropout:
        """Set the share of zeros."""
        self.init_p = float(p)
        return self

    def compute(self, value: Any) -> Any:
        output = F.dropout(value, self.init_p, self.training)
        return output if self.scale else output * (1 - self.init_p)


# Normalization, pooling, padding and resizing of images and sequences.

Normalize = layer(
    "Normalize",
    lambda self, x: x / (x.norm(self.p, 1 if x.dim() > 1 else 0, keepdim=True) + self.eps),
    "p, eps=1e-10",
)
SpatialCrossMapLRN = image_layer(
    "SpatialCrossMapLRN",
    lambda self, x: F.local_response_norm(x, self.size, self.alpha, self.beta, self.k),
    'size=5, alpha=1.0, beta=0.75, k=1.0, data_format="NCHW"',
)


class _SpatialPooling(ImageLayer):
    @property
    def data_format(self) -> str:
        return str(self.format)


class SpatialMaxPooling(
    _SpatialPooling,
    takes=arguments('kw, kh, dw=-1, dh=-1, pad_w=0, pad_h=0, to_ceil=False, format="NCHW"'),
):
    """The largest value of each window of an image.

    Steps dw and dh of -1 are the size of the window; pad_w and pad_h of -1 pad so that the output has the
    size of the input over the step.
    """

    def ceil(self) -> SpatialMaxPooling:
        """Round sizes up; returns the layer."""
        self.to_ceil = True
        return self

    def floor(self) -> SpatialMaxPooling:
        """Round sizes down."""
        self.to_ceil = False
        return self

    def of_images(self, images: Any) -> Any:
        kernel = (self.kh, self.kw)
        stride = (self.kh if self.dh == -1 else self.dh, self.kw if self.dw == -1 else self.dw)
        images, pad = padded(images, kernel, stride, (self.pad_h, self.pad_w), fill=-math.inf)
        return F.max_pool2d(images, kernel, stride, pad, ceil_mode=self.to_ceil)


class SpatialAveragePooling(
    _SpatialPooling,
    takes=arguments(
        "kw, kh, dw=1, dh=1, pad_w=0, pad_h=0, global_pooling=False, ceil_mode=False",
        'count_include_pad=True, divide=True, format="NCHW"',
    ),
):
    """The mean of each window of an image; without `divide`, the sum."""

    def of_images(self, images: Any) -> Any:
        kernel = tuple(images.shape[-2:]) if self.global_pooling else (self.kh, self.kw)
        stride = kernel if self.global_pooling else (self.dh, self.dw)
        images, pad = padded(images, kernel, stride, (self.pad_h, self.pad_w))
        divisor = None if self.divide else 1
        return F.avg_pool2d(images, kernel, stride, pad, self.ceil_mode, self.count_include_pad, divisor)


class TemporalMaxPooling(Layer, takes=arguments("k_w, d_w=-1")):
    """The largest value of each window along the steps of sequences (rows, steps, features).

    A window of -1 is all steps; a step of -1 is the window.
    """

    def compute(self, value: Any) -> Any:
        width = value.shape[-2] if self.k_w == -1 else self.k_w
        step = width if self.d_w == -1 else self.d_w
        return F.max_pool1d(value.transpose(-1, -2), width, step).transpose(-1, -2)


VolumetricMaxPooling = layer(
    "VolumetricMaxPooling",  # of (channels, time, height, width)
    lambda self, x: F.max_pool3d(
        x,
        (self.k_t, self.k_h, self.k_w),
        (self.d_t, self.d_h, self.d_w),
        (self.pad_t, self.pad_h, self.pad_w),
    ),
    "k_t, k_w, k_h, d_t, d_w, d_h, pad_t=0, pad_w=0, pad_h=0",
)
SpatialZeroPadding = layer(
    "SpatialZeroPadding",  # negative numbers cut off
    lambda self, x: F.pad(x, (self.pad_left, self.pad_right, self.pad_top, self.pad_bottom)),
    "pad_left, pad_right, pad_top, pad_bottom",
)
UpSampling1D = layer("UpSampling1D", lambda self, x: x.repeat_interleave(self.length, 1), "length")
UpSampling2D = image_layer(
    "UpSampling2D",
    lambda self, x: x.repeat_interleave(self.size[0], -2).repeat_interleave(self.size[1], -1),
    'size, data_format="nchw"',
)
ResizeBilinear = image_layer(
    "ResizeBilinear",
    lambda self, x: F.interpolate(
        x, (self.output_height, self.output_width), mode="bilinear", align_corners=self.align_corner
    ),
    'output_height, output_width, align_corner=False, data_format="NCHW"',
)


# Other shapes, and parts along an axis. `n_input_dims` are the axes of a row, where the axis counts those.


class Reshape(Layer, takes=arguments("size, batch_mode=None")):
    """The values in another shape.

    `batch_mode` says whether the first axis of the input is a batch. None: unless the input has just the
    values of one row, and more than one along its first axis.
    """

    def compute(self, value: Any) -> Any:
        alone = value.numel() == math.prod(self.size) and value.shape[0] != 1
        batch = not alone if self.batch_mode is None else self.batch_mode
        return value.reshape(value.shape[0], *self.size) if batch else value.reshape(tuple(self.size))


class View(Layer, takes=arguments("sizes, num_input_dims=0")):
    """The values in another shape; -1 is a length that follows from the others.

    The first axis stays where it is a batch, also a batch of one row. `num_input_dims` are the axes of a
    row; 0 finds out by the number of values.
    """

    def set_num_input_dims(self, num: int) -> View:
        """Set the number of axes of a row."""
        self.num_input_dims = num
        return self

    def compute(self, value: Any) -> Any:
        sizes = (self.sizes,) if isinstance(self.sizes, int) else tuple(self.sizes)
        if self.num_input_dims:
            leading = value.shape[: max(0, value.dim() - self.num_input_dims)]
            return value.reshape(*([math.prod(leading)] if leading else []), *sizes)
        known = math.prod(length for length in sizes if length != -1)
        rows, left = value.shape[0], value.numel() // max(1, value.shape[0])
        fits = left % known == 0 if -1 in sizes else left == known
        if fits and value.dim() > 1:
            return value.reshape(rows, *sizes)
        return value.reshape(sizes if value.numel() == known or -1 in sizes else (-1, *sizes))


class InferReshape(Layer, takes=arguments("size, batch_mode=False")):
    """The values in another shape: 0 is the length that the input has there, -1 follows from the others."""

    def compute(self, value: Any) -> Any:
        skipped = 1 if self.batch_mode else 0
        shape = [
            value.shape[place + skipped] if length == 0 else length for place, length in enumerate(self.size)
        ]
        return value.reshape(*value.shape[:skipped], *shape)


class Squeeze(Layer, takes=arguments("dim, num_input_dims=INTMIN")):
    """Without axes of length 1: one of them, or all where `dim` is None."""

    def compute(self, value: Any) -> Any:
        if self.dim is not None:
            return value.squeeze(axis_of(self.dim, value, self.num_input_dims))
        if is_batch(value, self.num_input_dims):
            return value.reshape(value.shape[0], *(length for length in value.shape[1:] if length != 1))
        return value.squeeze()


class Transpose(Layer, takes=arguments("permutations")):
    """With axes exchanged, a pair at a time."""

    def compute(self, value: Any) -> Any:
        for first, second in self.permutations:
            value = value.transpose(axis_of(first, value), axis_of(second, value))
        return value


class Select(Layer, takes=arguments("dim, index")):
    """One place of an axis, without the axis."""

    def compute(self, value: Any) -> Any:
        axis = axis_of(self.dim, value)
        return value.select(axis, place_of(self.index, value.shape[axis]))


class Narrow(Layer, takes=arguments("dimension, offset, length=1")):
    """A part of an axis: `length` places from `offset` on; -1 reaches to the last one, -2 to that before."""

    def compute(self, value: Any) -> Any:
        axis = axis_of(self.dimension, value)
        first = place_of(self.offset, value.shape[axis])
        length = self.length if self.length > 0 else value.shape[axis] - first + self.length + 1
        return value.narrow(axis, first, length)


class Replicate(Layer, takes=arguments("n_features, dim=1, n_dim=INTMAX")):
    """With a new axis, at the place `dim`, along which the input is repeated."""

    def compute(self, value: Any) -> Any:
        axis = self.dim - 1 + (value.dim() > self.n_dim)
        return value.unsqueeze(axis).expand([*value.shape[:axis], self.n_features, *value.shape[axis:]])


class Padding(Layer, takes=arguments("dim, pad, n_input_dim, value=0.0, n_index=1")):
    """An axis with `pad` values after what is there; negative numbers put them before."""

    def setup(self) -> None:
        if self.n_index != 1:
            raise ConfigError(f"Padding: n_index must be 1; received {self.n_index}.")

    def compute(self, value: Any) -> Any:
        axis = axis_of(self.dim, value, self.n_input_dim)
        sides = [0, 0] * (value.dim() - axis - 1)
        return F.pad(value, [*sides, max(0, -self.pad), max(0, self.pad)], value=self.value)


Contiguous = layer("Contiguous", lambda self, x: x.contiguous())
Unsqueeze = layer(
    "Unsqueeze",
    lambda self, x: x.unsqueeze(self.pos - 1 + is_batch(x, self.num_input_dims)),
    "pos, num_input_dims=INTMIN",
)
Reverse = layer("Reverse", lambda self, x: x.flip(axis_of(self.dimension, x)), "dimension=1")
Masking = layer(
    "Masking",  # zeros at the steps of sequences whose features all have this value
    lambda self, x: x * (x != self.mask_value).any(-1, keepdim=True),
    "mask_value",
)
Mean = layer(
    "Mean",
    lambda self, x: x.mean(axis_of(self.dimension, x, self.n_input_dims), keepdim=not self.squeeze),
    "dimension=1, n_input_dims=-1, squeeze=True",
)
Sum = layer(
    "Sum",  # with `size_average`, the mean
    lambda self, x: (torch.mean if self.size_average else torch.sum)(
        x, axis_of(self.dimension, x, self.n_input_dims), keepdim=not self.squeeze
    ),
    "dimension=1, n_input_dims=-1, size_average=False, squeeze=True",
)
Max = layer(
    "Max",
    lambda self, x: x.max(axis_of(self.dim, x, self.num_input_dims)).values,
    "dim, num_input_dims=INTMIN",
)
Min = layer(
    "Min",
    lambda self, x: x.min(axis_of(self.dim, x, self.num_input_dims)).values,
    "dim=1, num_input_dims=INTMIN",
)


# Tables, which are lists of tensors.


def _folded(self: Layer, table: Any, function: Callable[[Any, Any], Any]) -> Any:
    if not isinstance(table, list):
        raise ConfigError(f"{type(self).__name__} takes a table of tensors; received a single tensor.")
    return reduce(function, table)


CAddTable = layer("CAddTable", lambda self, x: _folded(self, x, torch.add), "inplace=False")
CSubTable = layer("CSubTable", lambda self, x: _folded(self, x, torch.sub))
CMulTable = layer("CMulTable", lambda self, x: _folded(self, x, torch.mul))
CDivTable = layer("CDivTable", lambda self, x: _folded(self, x, torch.div))
CMaxTable = layer("CMaxTable", lambda self, x: _folded(self, x, torch.maximum))
CMinTable = layer("CMinTable", lambda self, x: _folded(self, x, torch.minimum))
CAveTable = layer("CAveTable", lambda self, x: reduce(torch.add, x) / len(x), "inplace=False")
JoinTable = layer(
    "JoinTable",
    lambda self, x: torch.cat(x, axis_of(self.dimension, x[0], self.n_input_dims)),
    "dimension, n_input_dims=-1",
)
SplitTable = layer(
    "SplitTable",
    lambda self, x: list(x.unbind(axis_of(self.dimension, x, self.n_input_dims))),
    "dimension, n_input_dims=-1",
)
Pack = layer(
    "Pack",  # along a new axis
    lambda self, x: torch.stack(
        x if isinstance(x, list) else [x], self.dimension - 1 if self.dimension > 0 else self.dimension
    ),
    "dimension",
)
SelectTable = layer("SelectTable", lambda self, x: x[place_of(self.index, len(x))], "index")
DotProduct = layer("DotProduct", lambda self, x: (x[0] * x[1]).sum(-1))
PairwiseDistance = layer(
    "PairwiseDistance", lambda self, x: (x[0] - x[1]).norm(self.norm, -1, keepdim=True), "norm=2"
)
MM = layer(
    "MM",
    lambda self, x: (x[0].mT if self.trans_a else x[0]) @ (x[1].mT if self.trans_b else x[1]),
    "trans_a=False, trans_b=False",
)
MV = layer(
    "MV", lambda self, x: ((x[0].mT if self.trans else x[0]) @ x[1].unsqueeze(-1)).squeeze(-1), "trans=False"
)
Index = layer(
    "Index", lambda self, x: x[0].index_select(axis_of(self.dimension, x[0]), x[1].long() - 1), "dimension"
)
MaskedSelect = layer("MaskedSelect", lambda self, x: x[0].masked_select(x[1] != 0))


class NarrowTable(Layer, takes=arguments("offset, length=1")):
    """A part of a table: `length` elements from `offset` on; -1 is all that follow."""

    def compute(self, value: Any) -> Any:
        first = place_of(self.offset, len(value))
        end = first + self.length if self.length > 0 else len(value) + self.length + 1
        return list(value[first:end])


class FlattenTable(Layer):
    """A table of tables as one table."""

    def compute(self, value: Any) -> Any:
        return [leaf for part in value for leaf in (self.compute(part) if isinstance(part, list) else [part])]


class CrossProduct(Layer, takes=arguments("numTensor=0, embeddingSize=0")):
    """The dot products of the rows of each pair of tensors of a table; 0 is any number, and any size."""

    def compute(self, value: Any) -> Any:
        if self.numTensor and len(value) != self.numTensor:
            raise ConfigError(f"CrossProduct(numTensor={self.numTensor}) received {len(value)} tensors.")
        width = value[0].shape[-1]
        if self.embeddingSize and width != self.embeddingSize:
            raise ConfigError(f"CrossProduct(embeddingSize={self.embeddingSize}) received rows of {width}.")
        pairs = [(a, b) for place, a in enumerate(value) for b in value[place + 1 :]]
        return torch.stack([(a * b).sum(-1) for a, b in pairs], -1)


class CosineDistance(Layer):
    """The cosine of the angle between the rows of two tensors."""

    def compute(self, value: Any) -> Any:
        cosine = F.cosine_similarity(value[0], value[1], -1)
        return cosine.unsqueeze(-1) if cosine.dim() else cosine.reshape(1)


class MixtureTable(Layer, takes=arguments("dim=INTMAX")):
    """The second element, a table of tensors, weighted by the columns of the first.

    `dim` is, where the second element is one tensor, its axis of experts; the default is 2.
    """

    def compute(self, value: Any) -> Any:
        gates, experts = value
        axis = 1 if self.dim == INTMAX else self.dim - 1
        stacked = torch.stack(experts, 1) if isinstance(experts, list) else experts.movedim(axis, 1)
        return (gates.reshape(*gates.shape, *[1] * (stacked.dim() - 2)) * stacked).sum(1)
