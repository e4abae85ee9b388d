"""Layers without weights: activations, pooling, noise, and what takes, joins or reshapes tensors.

A row has the name and the arguments of a layer, and its output as a function of the layer and its input.
Axes and places are counted from 1; negative ones count from the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from kindler.compat.bigdl.arguments import INTMAX, arguments, classes
from kindler.compat.bigdl.nn.base import Layer
from kindler.errors import ConfigError

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...  # the classes of the tables


def axis_of(dimension: int, tensor: torch.Tensor, n_input_dims: int = -1) -> int:
    """torch's number of an axis; `n_input_dims` are the axes of one row, where `dimension` counts those."""
    if dimension == 0:
        raise ConfigError("axes are counted from 1; received 0.")
    axis = tensor.dim() + dimension if dimension < 0 else dimension - 1 + is_batch(tensor, n_input_dims)
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
        raise ConfigError(f"there is no position {index} among {size}; positions are counted from 1.")
    return place


def is_channels_last(data_format: str) -> bool:
    if data_format.upper() not in ("NCHW", "NHWC"):
        raise ConfigError(f"the format of images must be 'NCHW' or 'NHWC'; received {data_format!r}.")
    return data_format.upper() == "NHWC"


class ImageLayer(Layer):
    """A layer of images, which `of_images` gets with channels first, whatever `data_format` says."""

    def setup(self) -> None:
        self.has_channels_last()

    def has_channels_last(self) -> bool:
        return is_channels_last(vars(self).get("data_format") or self.format)

    def compute(self, value: Any) -> Any:
        if not self.has_channels_last():
            return self.of_images(value)
        return self.of_images(value.movedim(-1, -3)).movedim(-3, -1)


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
        value.shape[: -len(kernel) - 1 : -1], kernel[::-1], stride[::-1], strict=True
    ):
        missing = max(0, (math.ceil(size / step) - 1) * step + width - size)
        sides += [missing // 2, missing - missing // 2]
    return F.pad(value, sides, value=fill), (0,) * len(kernel)


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


def _average_pooling(o: Any, x: Any) -> Any:
    """The mean of each window of an image; without `divide`, the sum."""
    kernel = tuple(x.shape[-2:]) if o.global_pooling else (o.kh, o.kw)
    stride = kernel if o.global_pooling else (o.dh, o.dw)
    x, pad = padded(x, kernel, stride, (o.pad_h, o.pad_w))
    return F.avg_pool2d(x, kernel, stride, pad, o.ceil_mode, o.count_include_pad, None if o.divide else 1)


# Functions of each element, activations, noise in training, and resizing.
_ELEMENTS: dict[str, Callable[[Any, Any], Any]] = {
    "ReLU(ip=False)": lambda o, x: F.relu(x),
    "ReLU6(inplace=False)": lambda o, x: F.relu6(x),
    "Tanh": lambda o, x: torch.tanh(x),
    "Sigmoid": lambda o, x: torch.sigmoid(x),
    "LogSigmoid": lambda o, x: F.logsigmoid(x),
    "HardSigmoid": lambda o, x: (0.2 * x + 0.5).clamp(0.0, 1.0),
    "HardTanh(min_value=-1.0, max_value=1.0, inplace=False)": lambda o, x: x.clamp(o.min_value, o.max_value),
    "Clamp(min, max)": lambda o, x: x.clamp(o.min, o.max),
    "ELU(alpha=1.0, inplace=False)": lambda o, x: F.elu(x, o.alpha),
    "LeakyReLU(negval=0.01, inplace=False)": lambda o, x: F.leaky_relu(x, o.negval),
    # Below 0 a multiple of x that is drawn anew in training, and the mean of the limits otherwise.
    f"RReLU(lower=0.125, upper={1 / 3}, inplace=False)": lambda o, x: F.rrelu(
        x, o.lower, o.upper, o.training
    ),
    "SoftMax": lambda o, x: F.softmax(x, _channel_axis(x)),
    "SoftMin": lambda o, x: F.softmin(x, _channel_axis(x)),
    "LogSoftMax": lambda o, x: F.log_softmax(x, _channel_axis(x)),
    "SoftPlus(beta=1.0)": lambda o, x: F.softplus(x, o.beta),
    "SoftSign": lambda o, x: F.softsign(x),
    "SoftShrink(the_lambda=0.5)": lambda o, x: F.softshrink(x, o.the_lambda),
    "HardShrink(the_lambda=0.5)": lambda o, x: F.hardshrink(x, o.the_lambda),
    "TanhShrink": lambda o, x: F.tanhshrink(x),
    "Threshold(th=1e-6, v=0.0, ip=False)": lambda o, x: F.threshold(x, o.th, o.v),
    "Abs": lambda o, x: x.abs(),
    "Negative(inplace=False)": lambda o, x: -x,
    "Exp": lambda o, x: x.exp(),
    "Log": lambda o, x: x.log(),
    "Sqrt": lambda o, x: x.sqrt(),
    "Square": lambda o, x: x.square(),
    "Power(power, scale=1.0, shift=0.0)": lambda o, x: (o.shift + o.scale * x) ** o.power,
    "AddConstant(constant_scalar, inplace=False)": lambda o, x: x + o.constant_scalar,
    "MulConstant(scalar, inplace=False)": lambda o, x: x * o.scalar,
    "GradientReversal(the_lambda=1.0)": lambda o, x: _reversed(x, o.the_lambda),
    "Identity": lambda o, x: x,
    "Contiguous": lambda o, x: x.contiguous(),
    "GaussianNoise(stddev)": lambda o, x: x + o.stddev * torch.randn_like(x) if o.training else x,
    "GaussianDropout(rate)": lambda o, x: (
        x * (1 + (o.rate / (1 - o.rate)) ** 0.5 * torch.randn_like(x)) if o.training else x
    ),
    # Whole features of sequences (rows, steps, features).
    "SpatialDropout1D(init_p=0.5)": lambda o, x: F.dropout1d(x.mT, o.init_p, o.training).mT,
    "Normalize(p, eps=1e-10)": lambda o, x: x / (x.norm(o.p, 1 if x.dim() > 1 else 0, keepdim=True) + o.eps),
    # Zeros at the steps of sequences whose features all have this value.
    "Masking(mask_value)": lambda o, x: x * (x != o.mask_value).any(-1, keepdim=True),
    "UpSampling1D(length)": lambda o, x: x.repeat_interleave(o.length, 1),
    # The largest value of each window along the steps of sequences; -1 is all steps, and the window.
    "TemporalMaxPooling(k_w, d_w=-1)": lambda o, x: (
        F.max_pool1d(x.mT, x.shape[-2] if o.k_w == -1 else o.k_w, None if o.d_w == -1 else o.d_w).mT
    ),
    # Of (channels, time, height, width).
    "VolumetricMaxPooling(k_t, k_w, k_h, d_t, d_w, d_h, pad_t=0, pad_w=0, pad_h=0)": lambda o, x: (
        F.max_pool3d(x, (o.k_t, o.k_h, o.k_w), (o.d_t, o.d_h, o.d_w), (o.pad_t, o.pad_h, o.pad_w))
    ),
    # Negative numbers cut off.
    "SpatialZeroPadding(pad_left, pad_right, pad_top, pad_bottom)": lambda o, x: F.pad(
        x, (o.pad_left, o.pad_right, o.pad_top, o.pad_bottom)
    ),
}
_IMAGES: dict[str, Callable[[Any, Any], Any]] = {
    # Whole channels of images.
    'SpatialDropout2D(init_p=0.5, data_format="NCHW")': lambda o, x: F.dropout2d(x, o.init_p, o.training),
    'SpatialCrossMapLRN(size=5, alpha=1.0, beta=0.75, k=1.0, data_format="NCHW")': lambda o, x: (
        F.local_response_norm(x, o.size, o.alpha, o.beta, o.k)
    ),
    'UpSampling2D(size, data_format="nchw")': lambda o, x: x.repeat_interleave(
        o.size[0], -2
    ).repeat_interleave(o.size[1], -1),
    'ResizeBilinear(output_height, output_width, align_corner=False, data_format="NCHW")': lambda o, x: (
        F.interpolate(x, (o.output_height, o.output_width), mode="bilinear", align_corners=o.align_corner)
    ),
    "SpatialAveragePooling(kw, kh, dw=1, dh=1, pad_w=0, pad_h=0, global_pooling=False, ceil_mode=False, "
    'count_include_pad=True, divide=True, format="NCHW")': _average_pooling,
}


class Dropout(Layer, takes=arguments("init_p=0.5, inplace=False, scale=True")):
    """In training, zeros at random, a share of `init_p`.

    With `scale` the others are divided by `1 - init_p` in training; otherwise all are multiplied by it in
    evaluation.
    """

    def set_p(self, p: float) -> Dropout:
        self.init_p = float(p)
        return self

    def compute(self, value: Any) -> Any:
        output = F.dropout(value, self.init_p, self.training)
        return output if self.scale else output * (1 - self.init_p)


class SpatialMaxPooling(
    ImageLayer,
    takes=arguments('kw, kh, dw=-1, dh=-1, pad_w=0, pad_h=0, to_ceil=False, format="NCHW"'),
):
    """The largest value of each window of an image.

    Steps dw and dh of -1 are the size of the window; pad_w and pad_h of -1 pad so that the output has the
    size of the input over the step.
    """

    def ceil(self) -> SpatialMaxPooling:
        self.to_ceil = True
        return self

    def floor(self) -> SpatialMaxPooling:
        self.to_ceil = False
        return self

    def of_images(self, images: Any) -> Any:
        kernel = (self.kh, self.kw)
        stride = (self.kh if self.dh == -1 else self.dh, self.kw if self.dw == -1 else self.dw)
        images, pad = padded(images, kernel, stride, (self.pad_h, self.pad_w), fill=-math.inf)
        return F.max_pool2d(images, kernel, stride, pad, ceil_mode=self.to_ceil)


class View(Layer, takes=arguments("sizes, num_input_dims=0")):
    """The values in another shape; -1 is a length that follows from the others.

    The first axis stays where it is a batch, also a batch of one row. `num_input_dims` are the axes of a
    row; 0 finds out by the number of values.
    """

    def set_num_input_dims(self, num: int) -> View:
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


def _reshape(o: Any, x: Any) -> Any:
    """Without `batch_mode`, x is a batch unless it has the values of one row, and several along axis 1."""
    alone = x.numel() == math.prod(o.size) and x.shape[0] != 1
    batch = not alone if o.batch_mode is None else o.batch_mode
    return x.reshape(x.shape[0], *o.size) if batch else x.reshape(tuple(o.size))


def _infer_reshape(o: Any, x: Any) -> Any:
    """0 is the length that the input has there, -1 follows from the others."""
    skipped = 1 if o.batch_mode else 0
    shape = [x.shape[place + skipped] if length == 0 else length for place, length in enumerate(o.size)]
    return x.reshape(*x.shape[:skipped], *shape)


def _squeeze(o: Any, x: Any) -> Any:
    """Without axes of length 1: one of them, or all where `dim` is None."""
    if o.dim is not None:
        return x.squeeze(axis_of(o.dim, x, o.num_input_dims))
    if is_batch(x, o.num_input_dims):
        return x.reshape(x.shape[0], *(length for length in x.shape[1:] if length != 1))
    return x.squeeze()


def _transpose(o: Any, x: Any) -> Any:
    for first, second in o.permutations:
        x = x.transpose(axis_of(first, x), axis_of(second, x))
    return x


def _select(o: Any, x: Any) -> Any:
    axis = axis_of(o.dim, x)
    return x.select(axis, place_of(o.index, x.shape[axis]))


def _narrow(o: Any, x: Any) -> Any:
    """`length` places of an axis from `offset` on; -1 reaches to the last one, -2 to that before."""
    axis = axis_of(o.dimension, x)
    first = place_of(o.offset, x.shape[axis])
    return x.narrow(axis, first, o.length if o.length > 0 else x.shape[axis] - first + o.length + 1)


def _replicate(o: Any, x: Any) -> Any:
    """With a new axis, at the place `dim`, along which the input is repeated."""
    axis = o.dim - 1 + (x.dim() > o.n_dim)
    return x.unsqueeze(axis).expand([*x.shape[:axis], o.n_features, *x.shape[axis:]])


class Padding(Layer, takes=arguments("dim, pad, n_input_dim, value=0.0, n_index=1")):
    """An axis with `pad` values after what is there; negative numbers put them before."""

    def setup(self) -> None:
        if self.n_index != 1:
            raise ConfigError(f"Padding: n_index must be 1; received {self.n_index}.")

    def compute(self, value: Any) -> Any:
        axis = axis_of(self.dim, value, self.n_input_dim)
        sides = [0, 0] * (value.dim() - axis - 1)
        return F.pad(value, [*sides, max(0, -self.pad), max(0, self.pad)], value=self.value)


# Other shapes, and parts along an axis. `n_input_dims` are the axes of a row, where the axis counts those.
_SHAPES: dict[str, Callable[[Any, Any], Any]] = {
    "Reshape(size, batch_mode=None)": _reshape,
    "InferReshape(size, batch_mode=False)": _infer_reshape,
    "Squeeze(dim, num_input_dims=INTMIN)": _squeeze,
    "Unsqueeze(pos, num_input_dims=INTMIN)": lambda o, x: x.unsqueeze(
        o.pos - 1 + is_batch(x, o.num_input_dims)
    ),
    "Transpose(permutations)": _transpose,
    "Select(dim, index)": _select,
    "Narrow(dimension, offset, length=1)": _narrow,
    "Replicate(n_features, dim=1, n_dim=INTMAX)": _replicate,
    "Reverse(dimension=1)": lambda o, x: x.flip(axis_of(o.dimension, x)),
    "Mean(dimension=1, n_input_dims=-1, squeeze=True)": lambda o, x: x.mean(
        axis_of(o.dimension, x, o.n_input_dims), keepdim=not o.squeeze
    ),
    # With `size_average`, the mean.
    "Sum(dimension=1, n_input_dims=-1, size_average=False, squeeze=True)": lambda o, x: (
        torch.mean if o.size_average else torch.sum
    )(x, axis_of(o.dimension, x, o.n_input_dims), keepdim=not o.squeeze),
    "Max(dim, num_input_dims=INTMIN)": lambda o, x: x.max(axis_of(o.dim, x, o.num_input_dims)).values,
    "Min(dim=1, num_input_dims=INTMIN)": lambda o, x: x.min(axis_of(o.dim, x, o.num_input_dims)).values,
}


def _folded(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def compute(o: Layer, table: Any) -> Any:
        if not isinstance(table, list):
            raise ConfigError(f"{type(o).__name__} takes a table of tensors; received a single tensor.")
        return reduce(function, table)

    return compute


def _narrow_table(o: Any, x: Any) -> Any:
    """`length` elements from `offset` on; -1 is all that follow."""
    first = place_of(o.offset, len(x))
    return list(x[first : first + o.length if o.length > 0 else len(x) + o.length + 1])


def _flatten_table(o: Any, x: Any) -> Any:
    return [leaf for part in x for leaf in (_flatten_table(o, part) if isinstance(part, list) else [part])]


def _cross_product(o: Any, x: Any) -> Any:
    """The dot products of the rows of each pair of tensors; 0 is any number of them, and any size."""
    if o.numTensor and len(x) != o.numTensor:
        raise ConfigError(f"CrossProduct(numTensor={o.numTensor}) received {len(x)} tensors.")
    if o.embeddingSize and x[0].shape[-1] != o.embeddingSize:
        raise ConfigError(f"CrossProduct(embeddingSize={o.embeddingSize}) received rows of {x[0].shape[-1]}.")
    pairs = [(a, b) for place, a in enumerate(x) for b in x[place + 1 :]]
    return torch.stack([(a * b).sum(-1) for a, b in pairs], -1)


def _cosine_distance(o: Any, x: Any) -> Any:
    cosine = F.cosine_similarity(x[0], x[1], -1)
    return cosine.unsqueeze(-1) if cosine.dim() else cosine.reshape(1)


def _mixture(o: Any, x: Any) -> Any:
    """The second element, a table or a tensor with an axis of experts, weighted by columns of the first."""
    gates, experts = x
    axis = 1 if o.dim == INTMAX else o.dim - 1
    stacked = torch.stack(experts, 1) if isinstance(experts, list) else experts.movedim(axis, 1)
    return (gates.reshape(*gates.shape, *[1] * (stacked.dim() - 2)) * stacked).sum(1)


# Tables, which are lists of tensors.
_TABLES: dict[str, Callable[[Any, Any], Any]] = {
    "CAddTable(inplace=False)": _folded(torch.add),
    "CSubTable": _folded(torch.sub),
    "CMulTable": _folded(torch.mul),
    "CDivTable": _folded(torch.div),
    "CMaxTable": _folded(torch.maximum),
    "CMinTable": _folded(torch.minimum),
    "CAveTable(inplace=False)": lambda o, x: reduce(torch.add, x) / len(x),
    "JoinTable(dimension, n_input_dims=-1)": lambda o, x: torch.cat(
        x, axis_of(o.dimension, x[0], o.n_input_dims)
    ),
    "SplitTable(dimension, n_input_dims=-1)": lambda o, x: list(
        x.unbind(axis_of(o.dimension, x, o.n_input_dims))
    ),
    # Along a new axis.
    "Pack(dimension)": lambda o, x: torch.stack(
        x if isinstance(x, list) else [x], o.dimension - 1 if o.dimension > 0 else o.dimension
    ),
    "SelectTable(index)": lambda o, x: x[place_of(o.index, len(x))],
    "NarrowTable(offset, length=1)": _narrow_table,
    "FlattenTable": _flatten_table,
    "DotProduct": lambda o, x: (x[0] * x[1]).sum(-1),
    "CrossProduct(numTensor=0, embeddingSize=0)": _cross_product,
    "CosineDistance": _cosine_distance,
    "PairwiseDistance(norm=2)": lambda o, x: (x[0] - x[1]).norm(o.norm, -1, keepdim=True),
    "MM(trans_a=False, trans_b=False)": lambda o, x: (
        (x[0].mT if o.trans_a else x[0]) @ (x[1].mT if o.trans_b else x[1])
    ),
    "MV(trans=False)": lambda o, x: ((x[0].mT if o.trans else x[0]) @ x[1].unsqueeze(-1)).squeeze(-1),
    "Index(dimension)": lambda o, x: x[0].index_select(axis_of(o.dimension, x[0]), x[1].long() - 1),
    "MaskedSelect": lambda o, x: x[0].masked_select(x[1] != 0),
    "MixtureTable(dim=INTMAX)": _mixture,
}
globals().update(classes(__name__, Layer, {**_ELEMENTS, **_SHAPES, **_TABLES}, "compute"))
globals().update(classes(__name__, ImageLayer, _IMAGES, "of_images"))
