"""Layers with weights: linear ones, convolutions, tables of rows, batch normalization.

A row has the name and the arguments of a layer, its output as a function of the layer and its input, then the
shapes of weight and bias and the fan that they are drawn with.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from kindler.compat.bigdl.arguments import DOUBLEMAX, arguments, classes
from kindler.compat.bigdl.nn.base import Layer, Weighted
from kindler.compat.bigdl.nn.functions import is_channels_last, padded
from kindler.errors import ConfigError, DataError

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...  # the classes of the table


_REGULARIZED = "wRegularizer=None, bRegularizer=None"
_STARTED = "init_weight=None, init_bias=None"
_INITIAL = f"{_STARTED}, init_grad_weight=None, init_grad_bias=None"


class Linear(Weighted, takes=arguments("input_size, output_size, with_bias=True", _REGULARIZED, _INITIAL)):
    """`x @ weight.T + bias`, with a weight of shape (output_size, input_size)."""

    def shapes(self) -> tuple[Any, Any, float]:
        return (
            (self.output_size, self.input_size),
            self.output_size if self.with_bias else None,
            self.input_size,
        )

    def compute(self, value: Any) -> Any:
        return F.linear(value.to(self.weight.dtype), self.weight, self.bias)


class SparseLinear(
    Linear,
    takes=arguments(
        "input_size, output_size, with_bias=True, backwardStart=-1, backwardLength=-1", _REGULARIZED, _INITIAL
    ),
):
    """`Linear`; rows of sparse tensors come here as dense ones."""


def _volumetric_convolution(o: Any, x: Any) -> Any:
    kernel, stride = (o.k_t, o.k_h, o.k_w), (o.d_t, o.d_h, o.d_w)
    x, pad = padded(x, kernel, stride, (o.pad_t, o.pad_h, o.pad_w))
    return F.conv3d(x, o.weight, o.bias, stride, pad)


def _temporal_convolution(o: Any, x: Any) -> Any:
    """Along the steps of sequences (rows, steps, frame); the weight is (output frame, kernel_w * frame)."""
    x = (x if o.propagate_back else x.detach()).to(o.weight.dtype)
    kernel = o.weight.reshape(o.weight.shape[0], o.kernel_w, -1).transpose(1, 2)
    return F.conv1d(x.mT, kernel, o.bias, o.stride_w).mT


_TABLE = {
    # The weight repeats along the axes where it has length 1.
    "CMul(size, wRegularizer=None)": (
        lambda o, x: x * o.weight,
        lambda o: (tuple(o.size), None, math.prod(o.size)),
    ),
    "CAdd(size, bRegularizer=None)": (
        lambda o, x: x + o.bias,
        lambda o: (None, tuple(o.size), math.prod(o.size)),
    ),
    "Scale(size)": (
        lambda o, x: x * o.weight + o.bias,
        lambda o: (tuple(o.size), tuple(o.size), math.prod(o.size)),
    ),
    "Mul": (lambda o, x: x * o.weight, lambda o: (1, None, 1)),
    "Add(input_size)": (lambda o, x: x + o.bias, lambda o: (None, o.input_size, o.input_size)),
    # x1 @ weight[k] @ x2 + bias[k] of a table of two inputs.
    f"Bilinear(input_size1, input_size2, output_size, bias_res=True, {_REGULARIZED})": (
        lambda o, x: F.bilinear(x[0], x[1], o.weight, o.bias),
        lambda o: (
            (o.output_size, o.input_size1, o.input_size2),
            o.output_size if o.bias_res else None,
            o.input_size1,
        ),
    ),
    # The cosine of the angle between a row and each row of the weight.
    "Cosine(input_size, output_size)": (
        lambda o, x: F.linear(F.normalize(x, dim=-1), F.normalize(o.weight, dim=-1)),
        lambda o: ((o.output_size, o.input_size), None, o.output_size),
    ),
    # The distance of a row to each column of the weight.
    "Euclidean(input_size, output_size, fast_backward=True)": (
        lambda o, x: (x.unsqueeze(-1) - o.weight).norm(dim=-2),
        lambda o: ((o.input_size, o.output_size), None, o.input_size),
    ),
    "SpatialDilatedConvolution(n_input_plane, n_output_plane, kw, kh, dw=1, dh=1, pad_w=0, pad_h=0, "
    f"dilation_w=1, dilation_h=1, {_REGULARIZED})": (
        lambda o, x: F.conv2d(
            x, o.weight, o.bias, (o.dh, o.dw), (o.pad_h, o.pad_w), (o.dilation_h, o.dilation_w)
        ),
        lambda o: (
            (o.n_output_plane, o.n_input_plane, o.kh, o.kw),
            o.n_output_plane,
            o.n_input_plane * o.kh * o.kw,
        ),
    ),
    # The transpose of a convolution.
    "SpatialFullConvolution(n_input_plane, n_output_plane, kw, kh, dw=1, dh=1, pad_w=0, pad_h=0, adj_w=0, "
    f"adj_h=0, n_group=1, no_bias=False, {_REGULARIZED})": (
        lambda o, x: F.conv_transpose2d(
            x,
            o.weight.flatten(0, 1),
            o.bias,
            (o.dh, o.dw),
            (o.pad_h, o.pad_w),
            (o.adj_h, o.adj_w),
            o.n_group,
        ),
        lambda o: (
            (o.n_group, o.n_input_plane // o.n_group, o.n_output_plane // o.n_group, o.kh, o.kw),
            None if o.no_bias else o.n_output_plane,
            o.kh * o.kw * o.n_input_plane,
        ),
    ),
    "TemporalConvolution(input_frame_size, output_frame_size, kernel_w, stride_w=1, propagate_back=True, "
    f"weight_regularizer=None, bias_regularizer=None, {_INITIAL})": (
        _temporal_convolution,
        lambda o: (
            (o.output_frame_size, o.kernel_w * o.input_frame_size),
            o.output_frame_size,
            o.kernel_w * o.input_frame_size,
        ),
    ),
    # Of volumes (channels, time, height, width); the weight is (output, input, kt, kh, kw).
    "VolumetricConvolution(n_input_plane, n_output_plane, k_t, k_w, k_h, d_t=1, d_w=1, d_h=1, pad_t=0, "
    f"pad_w=0, pad_h=0, with_bias=True, {_REGULARIZED})": (
        _volumetric_convolution,
        lambda o: (
            (o.n_output_plane, o.n_input_plane, o.k_t, o.k_h, o.k_w),
            o.n_output_plane if o.with_bias else None,
            o.n_input_plane * o.k_t * o.k_h * o.k_w,
        ),
    ),
}
globals().update(classes(__name__, Weighted, _TABLE, "compute", "shapes"))


class PReLU(Weighted, takes=arguments("n_output_plane=0")):
    """x, and a learned multiple of x below 0: one for all, or one for each of `n_output_plane` channels."""

    def shapes(self) -> tuple[Any, Any, float]:
        return max(1, self.n_output_plane), None, 1

    def initialize(self) -> None:
        nn.init.constant_(self.weight, 0.25)

    def compute(self, value: Any) -> Any:
        return F.prelu(value, self.weight)


class LookupTable(
    Weighted,
    takes=arguments(
        "n_index, n_output, padding_value=0.0, max_norm=DOUBLEMAX, norm_type=2.0",
        "should_scale_grad_by_freq=False, wRegularizer=None",
    ),
):
    """The rows of a weight of shape (n_index, n_output) by their numbers, counted from 1.

    The row of `padding_value` is not trained; 0 is none. Rows longer than `max_norm` are shortened to it when
    they are used. With `should_scale_grad_by_freq` gradients are divided by how often a row is in a batch.
    """

    def shapes(self) -> tuple[Any, Any, float]:
        return (self.n_index, self.n_output), None, 1

    def initialize(self) -> None:
        nn.init.normal_(self.weight)

    def compute(self, value: Any) -> Any:
        places, count = value.long() - 1, self.weight.shape[0]
        if not value.is_cuda and value.numel() and (int(places.min()) < 0 or int(places.max()) >= count):
            wrong = value[(places < 0) | (places >= count)].flatten()[0].item()
            raise DataError(
                f"LookupTable has rows 1 to {count}; received {wrong:g}.\n"
                "Hint: as in BigDL, the first row has the number 1."
            )
        padding = int(self.padding_value) - 1 if self.padding_value else None
        max_norm = None if self.max_norm == DOUBLEMAX else self.max_norm
        by_frequency = self.should_scale_grad_by_freq
        return F.embedding(places, self.weight, padding, max_norm, self.norm_type, by_frequency)


class Highway(
    Layer, takes=arguments("size, with_bias=True, activation=None, wRegularizer=None, bRegularizer=None")
):
    """A gate t between a linear layer and its input: `t * activation(linear(x)) + (1 - t) * x`."""

    def setup(self) -> None:
        self.gate, self.transform = (
            Linear(self.size, self.size, self.with_bias, self.wRegularizer, self.bRegularizer)
            for _ in range(2)
        )
        self.activation = vars(self).pop("activation")  # a part, after the other two

    def compute(self, value: Any) -> Any:
        gate, output = torch.sigmoid(self.gate(value)), self.transform(value)
        if self.activation is not None:
            output = self.activation(output)
        return gate * output + (1 - gate) * value


class Maxout(
    Layer,
    takes=arguments(
        "input_size, output_size, maxout_number, with_bias=True, w_regularizer=None",
        "b_regularizer=None",
        _STARTED,
    ),
):
    """The largest of `maxout_number` linear outputs."""

    def setup(self) -> None:
        regularizers, initial = (self.w_regularizer, self.b_regularizer), (self.init_weight, self.init_bias)
        size = self.output_size * self.maxout_number
        self.linear = Linear(self.input_size, size, self.with_bias, *regularizers, *initial)

    def compute(self, value: Any) -> Any:
        output = self.linear(value)
        return output.reshape(*output.shape[:-1], self.maxout_number, self.output_size).amax(-2)


class SpatialConvolution(
    Weighted,
    takes=arguments(
        "n_input_plane, n_output_plane, kernel_w, kernel_h, stride_w=1, stride_h=1, pad_w=0",
        "pad_h=0, n_group=1, propagate_back=True",
        _REGULARIZED,
        _INITIAL,
        'with_bias=True, data_format="NCHW"',
    ),
):
    """A convolution of images.

    The weight has the shape (n_group, n_output_plane / n_group, n_input_plane / n_group, kernel_h, kernel_w);
    with `data_format="NHWC"` it is (n_group, kernel_h, kernel_w, n_input_plane / n_group,
    n_output_plane / n_group). A padding of -1 pads so that the output has the size of the input over the
    stride. Without `propagate_back` the input gets no gradient.
    """

    def shapes(self) -> tuple[Any, Any, float]:
        ins, outs = self.n_input_plane // self.n_group, self.n_output_plane // self.n_group
        kernel = (self.kernel_h, self.kernel_w)
        shape = (*kernel, ins, outs) if is_channels_last(self.data_format) else (outs, ins, *kernel)
        bias = self.n_output_plane if self.with_bias else None
        return (self.n_group, *shape), bias, math.prod(kernel) * self.n_input_plane

    def setup(self) -> None:
        if self.n_input_plane % self.n_group or self.n_output_plane % self.n_group:
            raise ConfigError(
                f"SpatialConvolution: n_group={self.n_group} must divide n_input_plane={self.n_input_plane}"
                f" and n_output_plane={self.n_output_plane}."
            )
        super().setup()

    def compute(self, value: Any) -> Any:
        value = (value if self.propagate_back else value.detach()).to(self.weight.dtype)
        weight, channels_last = self.weight, is_channels_last(self.data_format)
        if channels_last:
            value, weight = value.movedim(-1, -3), weight.permute(0, 4, 3, 1, 2)
        stride = (self.stride_h, self.stride_w)
        value, pad = padded(value, (self.kernel_h, self.kernel_w), stride, (self.pad_h, self.pad_w))
        output = F.conv2d(value, weight.flatten(0, 1), self.bias, stride, pad, groups=self.n_group)
        return output.movedim(-3, -1) if channels_last else output


class SpatialShareConvolution(SpatialConvolution):
    """`SpatialConvolution`."""


class BatchNormalization(
    Weighted, takes=arguments("n_output, eps=1e-5, momentum=0.1, affine=True", _INITIAL)
):
    """Rows minus their mean over the standard deviation of a batch; in evaluation, those of training.

    `eps` is added to the variance; `momentum` is how much of the running statistics a batch replaces;
    `affine` says whether there are a weight and a bias.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def shapes(self) -> tuple[Any, Any, float]:
        shape = self.n_output if self.affine else None
        return shape, shape, 1

    def setup(self) -> None:
        self.register_buffer("running_mean", torch.zeros(self.n_output))
        self.register_buffer("running_var", torch.ones(self.n_output))
        super().setup()

    def initialize(self) -> None:
        if self.affine:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)
        self.running_mean.zero_()
        self.running_var.fill_(1.0)

    def set_running_mean(self, running_mean: Any) -> BatchNormalization:
        self.running_mean.copy_(torch.as_tensor(running_mean))
        return self

    def set_running_std(self, running_std: Any) -> BatchNormalization:
        """Set the variance of evaluation, which BigDL calls so."""
        self.running_var.copy_(torch.as_tensor(running_std))
        return self

    def compute(self, value: Any) -> Any:
        mean, var, weight, bias = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(value, mean, var, weight, bias, self.training, self.momentum, self.eps)


class SpatialBatchNormalization(
    BatchNormalization,
    takes=arguments("n_output, eps=1e-5, momentum=0.1, affine=True", _INITIAL, 'data_format="NCHW"'),
):
    """`BatchNormalization` of the channels of images."""

    def setup(self) -> None:
        is_channels_last(self.data_format)
        super().setup()

    def compute(self, value: Any) -> Any:
        if not is_channels_last(self.data_format):
            return super().compute(value)
        return super().compute(value.movedim(-1, 1)).movedim(1, -1)
