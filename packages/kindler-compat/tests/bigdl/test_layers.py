"""Each layer against a function of numpy: what it computes, and its gradients by differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numeric
import numpy as np
import pytest
import torch

from kindler.compat.bigdl.nn import layer as layers
from kindler.compat.bigdl.nn.initialization_method import (
    BilinearFiller,
    ConstInitMethod,
    MsraFiller,
    Ones,
    RandomNormal,
    RandomUniform,
    Xavier,
    Zeros,
)
from kindler.compat.bigdl.nn.layer import *
from kindler.compat.bigdl.optim.optimizer import L2Regularizer
from kindler.compat.bigdl.util.common import JTensor, Sample
from kindler.errors import ConfigError, DataError

RNG = np.random.default_rng(0)


def some(*shape: int) -> Any:
    """Numbers that are not near each other, so that largest ones stay largest within a difference."""
    values = np.linspace(-1.3, 1.7, int(np.prod(shape)))
    return np.random.default_rng(3).permutation(values).reshape(shape)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def softmax(x: Any, axis: int = -1) -> Any:
    shifted = np.exp(x - x.max(axis, keepdims=True))
    return shifted / shifted.sum(axis, keepdims=True)


def windows(x: Any, kernel: tuple[int, int], stride: tuple[int, int]) -> Any:
    """The windows of images: (rows, channels, places down, places across, kernel height, kernel width)."""
    view = np.lib.stride_tricks.sliding_window_view(x, kernel, axis=(-2, -1))
    return view[..., :: stride[0], :: stride[1], :, :]


def padded(x: Any, height: int, width: int, value: float = 0.0) -> Any:
    sides = [(0, 0)] * (x.ndim - 2) + [(height, height), (width, width)]
    return np.pad(x, sides, constant_values=value)


def convolved(x: Any, weight: Any, bias: Any = 0.0, stride: Any = (1, 1)) -> Any:
    """Images and a weight (groups, outputs, inputs, height, width)."""
    parts = []
    for number, kernel in enumerate(weight):
        width = kernel.shape[1]
        seen = windows(x[:, number * width : (number + 1) * width], kernel.shape[2:], stride)
        parts.append(np.einsum("ncijhw,ochw->noij", seen, kernel))
    return np.concatenate(parts, 1) + np.reshape(bias, (1, -1, 1, 1))


def same(x: Any, kernel: int, stride: int, value: float = 0.0) -> Any:
    """Images with the padding that gives `ceil(size / stride)` windows."""
    size = x.shape[-1]
    missing = max(0, (-(-size // stride) - 1) * stride + kernel - size)
    sides = (missing // 2, missing - missing // 2)
    return np.pad(x, [(0, 0)] * (x.ndim - 2) + [sides, sides], constant_values=value)


def transposed(x: Any, weight: Any, bias: Any) -> Any:
    """The transpose of a convolution, with a stride of 2 and one padding, of one group."""
    rows, _, height, width = x.shape
    kernel = weight[0]
    made = np.zeros(
        (rows, kernel.shape[1], 2 * (height - 1) + kernel.shape[2], 2 * (width - 1) + kernel.shape[3])
    )
    for i in range(height):
        for j in range(width):
            patch = np.einsum("nc,cohw->nohw", x[:, :, i, j], kernel)
            made[:, :, 2 * i : 2 * i + kernel.shape[2], 2 * j : 2 * j + kernel.shape[3]] += patch
    return made[:, :, 1:-1, 1:-1] + bias.reshape(1, -1, 1, 1)


def dilated(x: Any, weight: Any, bias: Any) -> Any:
    wide = np.zeros((*weight.shape[:2], 3, 3))
    wide[:, :, ::2, ::2] = weight
    return convolved(x, wide[None], bias)


def temporal(x: Any, weight: Any, bias: Any) -> Any:
    steps = [x[:, start : start + 2].reshape(len(x), -1) for start in range(x.shape[1] - 1)]
    return np.stack([step @ weight.T + bias for step in steps], 1)


def volumetric(x: Any, weight: Any, bias: Any) -> Any:
    view = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], axis=(2, 3, 4))
    return np.einsum("nctijdhw,ocdhw->notij", view, weight) + bias.reshape(1, -1, 1, 1, 1)


def normalized(x: Any, weight: Any, bias: Any) -> Any:
    axes = (0,) if x.ndim == 2 else (0, 2, 3)
    shape = (1, -1) if x.ndim == 2 else (1, -1, 1, 1)
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * weight.reshape(shape) + bias.reshape(shape)


def across_channels(x: Any) -> Any:
    made = np.zeros_like(x)
    for channel in range(x.shape[1]):
        around = x[:, max(0, channel - 1) : channel + 2]
        made[:, channel] = x[:, channel] / (1.5 + 0.5 / 3 * (around**2).sum(1)) ** 0.75
    return made


def rnn(x: Any, w: Any, b: Any, u: Any, c: Any) -> Any:
    hidden, outputs = np.zeros((len(x), u.shape[0])), []
    for step in range(x.shape[1]):
        hidden = np.tanh(x[:, step] @ w.T + b + hidden @ u.T + c)
        outputs.append(hidden)
    return np.stack(outputs, 1)


def lstm(x: Any, w: Any, b: Any, u: Any) -> Any:
    size = u.shape[1]
    hidden = memory = np.zeros((len(x), size))
    outputs = []
    for step in range(x.shape[1]):
        gates = x[:, step] @ w.T + b + hidden @ u.T
        take, new, keep, show = (gates[:, n * size : (n + 1) * size] for n in range(4))
        memory = sigmoid(take) * np.tanh(new) + sigmoid(keep) * memory
        hidden = sigmoid(show) * np.tanh(memory)
        outputs.append(hidden)
    return np.stack(outputs, 1)


def peephole(x: Any, w: Any, b: Any, u: Any, of_input: Any, of_forget: Any, of_output: Any) -> Any:
    size = u.shape[1]
    hidden = memory = np.zeros((len(x), size))
    outputs = []
    for step in range(x.shape[1]):
        gates = x[:, step] @ w.T + b + hidden @ u.T
        take, keep, new, show = (gates[:, n * size : (n + 1) * size] for n in range(4))
        memory = (
            sigmoid(take + of_input * memory) * np.tanh(new) + sigmoid(keep + of_forget * memory) * memory
        )
        hidden = sigmoid(show + of_output * memory) * np.tanh(memory)
        outputs.append(hidden)
    return np.stack(outputs, 1)


def gru(x: Any, w: Any, b: Any, u: Any, v: Any) -> Any:
    size = v.shape[0]
    hidden, outputs = np.zeros((len(x), size)), []
    for step in range(x.shape[1]):
        seen = x[:, step] @ w.T + b
        gates = sigmoid(seen[:, : 2 * size] + hidden @ u.T)
        reset, update = gates[:, :size], gates[:, size:]
        new = np.tanh(seen[:, 2 * size :] + (reset * hidden) @ v.T)
        hidden = (1 - update) * new + update * hidden
        outputs.append(hidden)
    return np.stack(outputs, 1)


def both_ways(x: Any, *weights: Any) -> Any:
    half = len(weights) // 2
    return rnn(x, *weights[:half]) + rnn(x[:, ::-1], *weights[half:])[:, ::-1]


def decoded(x: Any, w: Any, b: Any, u: Any, c: Any) -> Any:
    hidden, seen, outputs = np.zeros((len(x), u.shape[0])), x, []
    for _ in range(3):
        hidden = np.tanh(seen @ w.T + b + hidden @ u.T + c)
        outputs.append(hidden)
        seen = hidden
    return np.stack(outputs, 1)


def resized(x: Any) -> Any:
    """Twice as many places in both directions, the corners staying where they are."""
    made = x
    for axis in (2, 3):
        places = np.linspace(0, made.shape[axis] - 1, 2 * made.shape[axis])
        low = np.minimum(places.astype(int), made.shape[axis] - 2)
        share = (places - low).reshape([-1 if n == axis else 1 for n in range(4)])
        made = made.take(low, axis) * (1 - share) + made.take(low + 1, axis) * share
    return made


@dataclass
class Case:
    """A layer, inputs, and the function of inputs and weights that it should be."""

    layer: Any
    reference: Callable[..., Any]
    inputs: list[Any]
    train: bool = True


def case(layer: Any, reference: Callable[..., Any], *inputs: Any, train: bool = True) -> Case:
    return Case(layer, reference, list(inputs), train)


X, POSITIVE, IMAGE, STEPS = some(3, 4), np.abs(some(3, 4)) + 0.1, some(2, 2, 4, 5), some(2, 3, 2)
OTHER = np.random.default_rng(5).permuted(some(3, 4))

CASES: dict[str, list[Case]] = {
    "Linear": [
        case(Linear(4, 3), lambda x, w, b: x @ w.T + b, X),
        case(Linear(4, 3, False), lambda x, w: x @ w.T, X),
    ],
    "SparseLinear": [case(SparseLinear(4, 3), lambda x, w, b: x @ w.T + b, X)],
    "CMul": [case(CMul([1, 4]), lambda x, w: x * w, X)],
    "CAdd": [case(CAdd([1, 4]), lambda x, b: x + b, X)],
    "Scale": [case(Scale([1, 4]), lambda x, w, b: x * w + b, X)],
    "Mul": [case(Mul(), lambda x, w: x * w, X)],
    "Add": [case(Add(4), lambda x, b: x + b, X)],
    "Bilinear": [
        case(Bilinear(4, 3, 2), lambda x, y, w, b: np.einsum("ni,kij,nj->nk", x, w, y) + b, X, some(3, 3))
    ],
    "Cosine": [
        case(
            Cosine(4, 3),
            lambda x, w: x @ w.T / np.linalg.norm(x, axis=1)[:, None] / np.linalg.norm(w, axis=1),
            X,
        )
    ],
    "Euclidean": [
        case(Euclidean(4, 3), lambda x, w: np.sqrt(((x[:, :, None] - w) ** 2).sum(1)), X),
    ],
    "Highway": [
        case(
            Highway(4, activation=Tanh()),
            lambda x, g, c, w, b: (t := sigmoid(x @ g.T + c)) * np.tanh(x @ w.T + b) + (1 - t) * x,
            X,
        )
    ],
    "Maxout": [case(Maxout(4, 2, 3), lambda x, w, b: (x @ w.T + b).reshape(3, 3, 2).max(1), X)],
    "SpatialConvolution": [
        case(SpatialConvolution(2, 3, 3, 2), convolved, IMAGE),
        case(
            SpatialConvolution(2, 4, 2, 2, 2, 1, 1, 1, n_group=2),
            lambda x, w, b: convolved(padded(x, 1, 1), w, b, (1, 2)),
            IMAGE,
        ),
        case(
            SpatialConvolution(2, 2, 3, 3, 2, 2, -1, -1, with_bias=False),
            lambda x, w: convolved(same(x, 3, 2), w, 0.0, (2, 2)),
            some(1, 2, 4, 4),
        ),
        case(
            SpatialConvolution(2, 3, 2, 2, data_format="NHWC"),
            lambda x, w, b: convolved(x.transpose(0, 3, 1, 2), w.transpose(0, 4, 3, 1, 2), b).transpose(
                0, 2, 3, 1
            ),
            some(2, 3, 3, 2),
        ),
    ],
    "SpatialShareConvolution": [case(SpatialShareConvolution(2, 3, 3, 2), convolved, IMAGE)],
    "SpatialDilatedConvolution": [
        case(SpatialDilatedConvolution(2, 2, 2, 2, dilation_w=2, dilation_h=2), dilated, IMAGE)
    ],
    "SpatialFullConvolution": [
        case(SpatialFullConvolution(2, 3, 3, 3, 2, 2, 1, 1), transposed, some(1, 2, 2, 3)),
    ],
    "TemporalConvolution": [case(TemporalConvolution(2, 3, 2), temporal, STEPS)],
    "VolumetricConvolution": [case(VolumetricConvolution(1, 2, 2, 2, 2), volumetric, some(1, 1, 3, 3, 2))],
    "SpatialMaxPooling": [
        case(SpatialMaxPooling(2, 2, 2, 2), lambda x: windows(x, (2, 2), (2, 2)).max((-1, -2)), IMAGE),
        case(
            SpatialMaxPooling(3, 3, 2, 2, 1, 1),
            lambda x: windows(padded(x, 1, 1, -np.inf), (3, 3), (2, 2)).max((-1, -2)),
            IMAGE,
        ),
        case(
            SpatialMaxPooling(2, 2, 2, 2, to_ceil=True),
            lambda x: windows(
                np.pad(x, [(0, 0)] * 3 + [(0, 1)], constant_values=-np.inf), (2, 2), (2, 2)
            ).max((-1, -2)),
            IMAGE,
        ),
        case(
            SpatialMaxPooling(3, 3, 2, 2, -1, -1),
            lambda x: windows(same(x, 3, 2, -np.inf), (3, 3), (2, 2)).max((-1, -2)),
            some(1, 2, 4, 4),
        ),
    ],
    "SpatialAveragePooling": [
        case(SpatialAveragePooling(2, 3), lambda x: windows(x, (3, 2), (1, 1)).mean((-1, -2)), IMAGE),
        case(
            SpatialAveragePooling(2, 2, 2, 2, divide=False),
            lambda x: windows(x, (2, 2), (2, 2)).sum((-1, -2)),
            IMAGE,
        ),
        case(
            SpatialAveragePooling(1, 1, global_pooling=True), lambda x: x.mean((2, 3), keepdims=True), IMAGE
        ),
        case(
            SpatialAveragePooling(2, 2, 2, 2, 1, 1),
            lambda x: windows(padded(x, 1, 1), (2, 2), (2, 2)).mean((-1, -2)),
            IMAGE,
        ),
    ],
    "TemporalMaxPooling": [
        case(TemporalMaxPooling(2, 1), lambda x: np.maximum(x[:, :-1], x[:, 1:]), STEPS),
        case(TemporalMaxPooling(-1), lambda x: x.max(1, keepdims=True), STEPS),
    ],
    "VolumetricMaxPooling": [
        case(
            VolumetricMaxPooling(1, 2, 2, 1, 2, 2),
            lambda x: windows(x, (2, 2), (2, 2)).max((-1, -2)),
            some(1, 1, 2, 4, 4),
        )
    ],
    "SpatialZeroPadding": [
        case(SpatialZeroPadding(1, 2, 0, 1), lambda x: np.pad(x, [(0, 0), (0, 0), (0, 1), (1, 2)]), IMAGE)
    ],
    "UpSampling1D": [case(UpSampling1D(2), lambda x: x.repeat(2, 1), STEPS)],
    "UpSampling2D": [case(UpSampling2D([2, 3]), lambda x: x.repeat(2, 2).repeat(3, 3), some(1, 2, 2, 2))],
    "ResizeBilinear": [case(ResizeBilinear(4, 6, True), resized, some(1, 2, 2, 3))],
    "BatchNormalization": [
        case(BatchNormalization(4), normalized, X),
        case(BatchNormalization(4, affine=False), lambda x: (x - 0.0) / np.sqrt(1 + 1e-5), X, train=False),
    ],
    "SpatialBatchNormalization": [
        case(SpatialBatchNormalization(2), normalized, some(2, 2, 2, 3)),
        case(
            SpatialBatchNormalization(2, data_format="NHWC"),
            lambda x, w, b: normalized(x.transpose(0, 3, 1, 2), w, b).transpose(0, 2, 3, 1),
            some(2, 2, 3, 2),
        ),
    ],
    "SpatialCrossMapLRN": [case(SpatialCrossMapLRN(3, 0.5, 0.75, 1.5), across_channels, some(1, 4, 2, 2))],
    "Normalize": [case(Normalize(2), lambda x: x / (np.linalg.norm(x, axis=1)[:, None] + 1e-10), X)],
    "Dropout": [
        case(Dropout(0.4), lambda x: x, X, train=False),
        case(Dropout(0.4, scale=False), lambda x: 0.6 * x, X, train=False),
    ],
    "GaussianDropout": [case(GaussianDropout(0.4), lambda x: x, X, train=False)],
    "GaussianNoise": [case(GaussianNoise(0.4), lambda x: x, X, train=False)],
    "SpatialDropout1D": [case(SpatialDropout1D(), lambda x: x, STEPS, train=False)],
    "SpatialDropout2D": [case(SpatialDropout2D(), lambda x: x, IMAGE, train=False)],
    "ReLU": [case(ReLU(), lambda x: np.maximum(x, 0), X)],
    "ReLU6": [case(ReLU6(), lambda x: np.clip(x, 0, 6), 5 * X)],
    "Tanh": [case(Tanh(), np.tanh, X)],
    "Sigmoid": [case(Sigmoid(), sigmoid, X)],
    "LogSigmoid": [case(LogSigmoid(), lambda x: np.log(sigmoid(x)), X)],
    "HardSigmoid": [case(HardSigmoid(), lambda x: np.clip(0.2 * x + 0.5, 0, 1), 3 * X)],
    "HardTanh": [case(HardTanh(-0.5, 0.7), lambda x: np.clip(x, -0.5, 0.7), X)],
    "Clamp": [case(Clamp(-0.5, 0.7), lambda x: np.clip(x, -0.5, 0.7), X)],
    "ELU": [case(ELU(0.7), lambda x: np.where(x > 0, x, 0.7 * (np.exp(x) - 1)), X)],
    "LeakyReLU": [case(LeakyReLU(0.2), lambda x: np.where(x > 0, x, 0.2 * x), X)],
    "PReLU": [
        case(PReLU(), lambda x, w: np.where(x > 0, x, w * x), X),
        case(PReLU(2), lambda x, w: np.where(x > 0, x, w.reshape(1, 2, 1, 1) * x), some(2, 2, 2, 2)),
    ],
    "RReLU": [case(RReLU(), lambda x: np.where(x > 0, x, (1 / 8 + 1 / 3) / 2 * x), X, train=False)],
    "SoftMax": [
        case(SoftMax(), softmax, X),
        case(SoftMax(), lambda x: softmax(x, 1), some(2, 3, 2, 2)),
    ],
    "SoftMin": [case(SoftMin(), lambda x: softmax(-x), X)],
    "LogSoftMax": [case(LogSoftMax(), lambda x: np.log(softmax(x)), X)],
    "SoftPlus": [case(SoftPlus(2.0), lambda x: np.log1p(np.exp(2 * x)) / 2, X)],
    "SoftSign": [case(SoftSign(), lambda x: x / (1 + np.abs(x)), X)],
    "SoftShrink": [case(SoftShrink(0.3), lambda x: np.sign(x) * np.maximum(np.abs(x) - 0.3, 0), X)],
    "HardShrink": [case(HardShrink(0.3), lambda x: np.where(np.abs(x) > 0.3, x, 0), X)],
    "TanhShrink": [case(TanhShrink(), lambda x: x - np.tanh(x), X)],
    "Threshold": [case(Threshold(0.3, 0.1), lambda x: np.where(x > 0.3, x, 0.1), X)],
    "Abs": [case(Abs(), np.abs, X)],
    "Negative": [case(Negative(), lambda x: -x, X)],
    "Exp": [case(Exp(), np.exp, X)],
    "Log": [case(Log(), np.log, POSITIVE)],
    "Sqrt": [case(Sqrt(), np.sqrt, POSITIVE)],
    "Square": [case(Square(), np.square, X)],
    "Power": [case(Power(3, 0.5, 2.0), lambda x: (2.0 + 0.5 * x) ** 3, X)],
    "AddConstant": [case(AddConstant(1.5), lambda x: x + 1.5, X)],
    "MulConstant": [case(MulConstant(1.5), lambda x: 1.5 * x, X)],
    "Identity": [case(Identity(), lambda x: x, X)],
    "Contiguous": [case(Contiguous(), lambda x: x, X)],
    "Reshape": [
        case(Reshape([2, 2]), lambda x: x.reshape(3, 2, 2), X),
        case(Reshape([4, 3]), lambda x: x.reshape(4, 3), X),
        case(Reshape([2, 2]), lambda x: x.reshape(1, 2, 2), some(1, 4)),
        case(Reshape([3, 4], False), lambda x: x.reshape(3, 4), some(4, 3)),
    ],
    "View": [
        case(View([8]), lambda x: x.reshape(2, 8), some(2, 2, 4)),
        case(View(8), lambda x: x.reshape(1, 8), some(1, 2, 4)),
        case(View([-1, 2], 2), lambda x: x.reshape(2, 4, 2), some(2, 2, 4)),
        case(View([3, 8]), lambda x: x.reshape(3, 8), some(2, 3, 4)),
    ],
    "InferReshape": [
        case(InferReshape([0, -1]), lambda x: x.reshape(2, 8), some(2, 2, 4)),
        case(InferReshape([-1, 2], True), lambda x: x.reshape(2, 4, 2), some(2, 2, 4)),
    ],
    "Squeeze": [
        case(Squeeze(2), lambda x: x[:, 0], some(2, 1, 3)),
        case(Squeeze(1, 2), lambda x: x[:, 0], some(2, 1, 3)),
        case(Squeeze(None, 2), lambda x: x[:, 0], some(1, 1, 3)),
    ],
    "Unsqueeze": [
        case(Unsqueeze(2), lambda x: x[:, None], X),
        case(Unsqueeze(1, 1), lambda x: x[:, None], X),
    ],
    "Transpose": [case(Transpose([(1, 2), (2, 3)]), lambda x: x.swapaxes(0, 1).swapaxes(1, 2), STEPS)],
    "Select": [
        case(Select(2, 1), lambda x: x[:, 0], STEPS),
        case(Select(-1, -1), lambda x: x[..., -1], STEPS),
    ],
    "Narrow": [
        case(Narrow(2, 2, 2), lambda x: x[:, 1:3], X),
        case(Narrow(2, 2, -1), lambda x: x[:, 1:], X),
    ],
    "Replicate": [case(Replicate(3, 2), lambda x: np.repeat(x[:, None], 3, 1), X)],
    "Reverse": [case(Reverse(2), lambda x: x[:, ::-1], X)],
    "Padding": [
        case(Padding(1, -2, 1, 7.0), lambda x: np.pad(x, [(0, 0), (2, 0)], constant_values=7.0), X),
        case(Padding(1, 2, 1), lambda x: np.pad(x, [(0, 0), (0, 2)]), X),
    ],
    "Masking": [
        case(
            Masking(2.0),
            lambda x: np.where((x == 2.0).all(-1, keepdims=True), 0.0, x),
            np.concatenate([np.full((2, 1, 2), 5.0), STEPS], 1),
        )
    ],
    "Mean": [
        case(Mean(2), lambda x: x.mean(1), X),
        case(Mean(1, 1, False), lambda x: x.mean(1, keepdims=True), X),
    ],
    "Sum": [
        case(Sum(2), lambda x: x.sum(1), X),
        case(Sum(1, 1, True), lambda x: x.mean(1), X),
    ],
    "Max": [case(Max(2), lambda x: x.max(1), X), case(Max(1, 1), lambda x: x.max(1), X)],
    "Min": [case(Min(2), lambda x: x.min(1), X)],
    "JoinTable": [
        case(JoinTable(2), lambda x, y: np.concatenate([x, y], 1), X, OTHER),
        case(JoinTable(1, 1), lambda x, y: np.concatenate([x, y], 1), X, OTHER),
    ],
    "CAddTable": [case(CAddTable(), lambda x, y, z: x + y + z, X, OTHER, POSITIVE)],
    "CSubTable": [case(CSubTable(), lambda x, y: x - y, X, OTHER)],
    "CMulTable": [case(CMulTable(), lambda x, y, z: x * y * z, X, OTHER, POSITIVE)],
    "CDivTable": [case(CDivTable(), lambda x, y: x / y, X, POSITIVE)],
    "CMaxTable": [case(CMaxTable(), np.maximum, X, OTHER + 0.05)],
    "CMinTable": [case(CMinTable(), np.minimum, X, OTHER + 0.05)],
    "CAveTable": [case(CAveTable(), lambda x, y: (x + y) / 2, X, OTHER)],
    "DotProduct": [case(DotProduct(), lambda x, y: (x * y).sum(1), X, OTHER)],
    "CrossProduct": [
        case(
            CrossProduct(3, 4),
            lambda x, y, z: np.stack([(x * y).sum(1), (x * z).sum(1), (y * z).sum(1)], 1),
            X,
            OTHER,
            POSITIVE,
        )
    ],
    "CosineDistance": [
        case(
            CosineDistance(),
            lambda x, y: ((x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1))[:, None],
            X,
            OTHER,
        )
    ],
    "PairwiseDistance": [
        case(PairwiseDistance(), lambda x, y: np.sqrt(((x - y) ** 2).sum(1))[:, None], X, POSITIVE),
        case(PairwiseDistance(1), lambda x, y: np.abs(x - y).sum(1)[:, None], X, POSITIVE + 2),
    ],
    "MM": [case(MM(trans_b=True), lambda x, y: x @ y.swapaxes(1, 2), some(2, 3, 4), some(2, 2, 4))],
    "MV": [case(MV(), lambda x, y: np.einsum("nij,nj->ni", x, y), some(2, 3, 4), some(2, 4))],
    "Pack": [case(Pack(2), lambda x, y: np.stack([x, y], 1), X, OTHER)],
    "SelectTable": [case(SelectTable(-1), lambda x, y: y, X, OTHER)],
    "Recurrent": [case(Recurrent().add(RnnCell(2, 3, Tanh())), rnn, STEPS)],
    "RnnCell": [
        case(
            Recurrent().add(RnnCell(2, 3, "tanh", False, False)),
            lambda x, w, u: rnn(x, w, 0.0, u, 0.0),
            STEPS,
        )
    ],
    "LSTM": [case(Recurrent().add(LSTM(2, 3)), lstm, STEPS)],
    "LSTMPeephole": [case(Recurrent().add(LSTMPeephole(2, 3)), peephole, STEPS)],
    "GRU": [case(Recurrent().add(GRU(2, 3)), gru, STEPS)],
    "BiRecurrent": [case(BiRecurrent().add(RnnCell(2, 3, Tanh())), both_ways, STEPS)],
    "RecurrentDecoder": [case(RecurrentDecoder(3).add(RnnCell(3, 3, Tanh())), decoded, some(2, 3))],
    "Sequential": [case(Sequential().add(Linear(4, 2)).add(Tanh()), lambda x, w, b: np.tanh(x @ w.T + b), X)],
    "Concat": [
        case(
            Concat(2).add(Tanh()).add(Linear(4, 2)),
            lambda x, w, b: np.concatenate([np.tanh(x), x @ w.T + b], 1),
            X,
        )
    ],
    "ConcatTable": [
        case(
            Sequential().add(ConcatTable().add(Tanh()).add(Square())).add(CAddTable()),
            lambda x: np.tanh(x) + x**2,
            X,
        )
    ],
    "ParallelTable": [
        case(
            Sequential().add(ParallelTable().add(Tanh()).add(Square())).add(CAddTable()),
            lambda x, y: np.tanh(x) + y**2,
            X,
            OTHER,
        )
    ],
    "MapTable": [
        case(
            Sequential().add(MapTable(Linear(4, 2))).add(JoinTable(2)),
            lambda x, y, w, b: np.concatenate([x @ w.T + b, y @ w.T + b], 1),
            X,
            OTHER,
        )
    ],
    "FlattenTable": [
        case(
            Sequential()
            .add(ConcatTable().add(ConcatTable().add(Tanh()).add(Square())).add(Identity()))
            .add(FlattenTable())
            .add(JoinTable(2)),
            lambda x: np.concatenate([np.tanh(x), x**2, x], 1),
            X,
        )
    ],
    "SplitTable": [
        case(Sequential().add(SplitTable(1, 1)).add(CAddTable()), lambda x: x.sum(1), X),
    ],
    "NarrowTable": [
        case(
            Sequential().add(SplitTable(2)).add(NarrowTable(2, 2)).add(CMulTable()),
            lambda x: x[:, 1] * x[:, 2],
            X,
        )
    ],
    "MixtureTable": [
        case(
            Sequential().add(ParallelTable().add(Identity()).add(SplitTable(2))).add(MixtureTable()),
            lambda g, x: np.einsum("ne,nef->nf", g, x),
            some(2, 3),
            some(2, 3, 2),
        )
    ],
    "TimeDistributed": [
        case(TimeDistributed(Linear(2, 3)), lambda x, w, b: x @ w.T + b, STEPS),
    ],
    "Bottle": [case(Bottle(Linear(2, 3)), lambda x, w, b: x @ w.T + b, STEPS)],
}
# Tested by themselves, below.
OTHERS = {
    "Layer",
    "Node",
    "Container",
    "Cell",
    "Input",
    "Model",
    "LookupTable",
    "GradientReversal",
    "Index",
    "MaskedSelect",
}


def test_every_layer_has_a_reference() -> None:
    assert {*CASES, *OTHERS} == set(layers.__all__)
    assert len(layers.__all__) == len(set(layers.__all__))


@pytest.mark.parametrize(
    ("name", "number"), [(n, i) for n, cases in CASES.items() for i in range(len(cases))]
)
def test_a_layer_computes_what_numpy_does_and_its_gradients(name: str, number: int) -> None:
    given = CASES[name][number]
    layer = given.layer.double().train(given.train)
    weights = layer.get_weights()
    inputs = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in given.inputs]

    output = layer(*inputs)
    expected = given.reference(*given.inputs, *weights)

    assert tuple(output.shape) == expected.shape
    np.testing.assert_allclose(output.detach().numpy(), expected, rtol=1e-9, atol=1e-9)
    outward = np.random.default_rng(1).normal(size=expected.shape)
    parameters = list(layer.parameters())
    found = torch.autograd.grad(
        (output * torch.tensor(outward)).sum(), [*inputs, *parameters], allow_unused=True
    )
    by_differences = numeric.gradients(given.reference, [*given.inputs, *weights], outward)
    for gradient, reference in zip(found, by_differences, strict=True):
        got = np.zeros_like(reference) if gradient is None else gradient.numpy()
        np.testing.assert_allclose(got, reference, rtol=1e-4, atol=1e-6)


def test_rows_of_a_lookup_table_are_counted_from_1_and_padding_is_not_trained() -> None:
    table = LookupTable(3, 2, padding_value=2)

    output = table.forward(np.array([[1, 3], [2, 1]]))

    weight = table.get_weights()[0]
    np.testing.assert_array_equal(output, weight[[[0, 2], [1, 0]]])
    table.backward(np.array([[1, 3], [2, 1]]), np.ones((2, 2, 2)))
    np.testing.assert_array_equal(table.weight.grad.numpy(), [[2, 2], [0, 0], [1, 1]])
    with pytest.raises(DataError, match="rows 1 to 3; received 0"):
        table.forward(np.array([0]))
    with pytest.raises(DataError, match="rows 1 to 3; received 4"):
        table.forward(np.array([1, 4]))


def test_rows_of_a_lookup_table_that_are_too_long_are_shortened() -> None:
    table = LookupTable(2, 2, max_norm=1.0)
    table.set_weights([np.array([[3.0, 4.0], [0.3, 0.4]])])

    np.testing.assert_allclose(table.forward(np.array([1, 2])), [[0.6, 0.8], [0.3, 0.4]], rtol=1e-5)


def test_layers_that_choose_values_choose_them_and_their_gradients() -> None:
    np.testing.assert_array_equal(Index(2).forward([X, np.array([3, 1])]), X.astype("float32")[:, [2, 0]])
    mask = (X > 0).astype("float32")
    np.testing.assert_array_equal(MaskedSelect().forward([X, mask]), X.astype("float32")[X > 0])
    reversal = GradientReversal(0.5)
    np.testing.assert_array_equal(reversal.forward(X), X.astype("float32"))
    np.testing.assert_array_equal(reversal.backward(X, np.ones_like(X)), np.full_like(X, -0.5))


def test_dropout_keeps_the_mean_and_its_share_of_values() -> None:
    torch.manual_seed(0)
    ones = np.ones((200, 100))
    for layer in (Dropout(0.3), GaussianDropout(0.3), GaussianNoise(0.3), SpatialDropout1D(0.3), RReLU()):
        shaped = ones.reshape(20, 10, 100)
        assert abs(layer.forward(shaped).mean() - 1.0) < 0.05
    assert abs((Dropout(0.3).forward(ones) == 0).mean() - 0.3) < 0.02
    unscaled = Dropout(0.3, scale=False).forward(ones)
    assert set(np.unique(unscaled)) == {0.0, np.float32(1 / 0.7 * 0.7)}
    channels = SpatialDropout2D(0.5).forward(np.ones((50, 4, 3, 3)))
    assert set(np.unique(channels.std((2, 3)))) == {0.0}


def test_a_graph_of_several_inputs_and_outputs_computes_each_node_once() -> None:
    first, second = Input("a"), Input()
    shared = Linear(4, 2).set_name("shared")
    left, right = shared(first), shared(second)
    joined = JoinTable(2)([left, right])
    model = Model([first, second], [CAddTable()([left, right]), Linear(4, 1)(joined)])

    added, made = model.forward([X, OTHER])

    w, b, v, c = model.get_weights()
    np.testing.assert_allclose(added, X @ w.T + b + OTHER @ w.T + b, rtol=1e-4)
    both = np.concatenate([X @ w.T + b, OTHER @ w.T + b], 1)
    np.testing.assert_allclose(made, both @ v.T + c, rtol=1e-4, atol=1e-5)
    gradients = model.backward([X, OTHER], [np.ones_like(added), np.zeros_like(made)])
    np.testing.assert_allclose(gradients[1], np.ones((3, 2)) @ w, rtol=1e-4)
    assert model.node("shared").element() is shared
    assert model.new_copy().layers[1] is not model.layers[1]


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (lambda: Model(Input(), Tanh()(Input())), "takes no input"),
        (lambda: Model([a := Input(), Input()], Tanh()(a)), "does not lead to any of its outputs"),
        (Model, "takes nodes"),
        (lambda: Sequential().add(Tanh()(Input())), "add takes a layer"),
        (lambda: Sequential().add(np.tanh), "add takes a layer"),
        (lambda: Recurrent().add(Linear(2, 2)), "takes a cell"),
        (lambda: Recurrent().add(LSTM(2, 2)).add(LSTM(2, 2)), "already has a cell"),
        (lambda: Recurrent().forward(STEPS), "has no cell"),
        (lambda: RnnCell(2, 2, "tan"), "the activation must be"),
        (lambda: SpatialConvolution(3, 4, 2, 2, n_group=2), "must divide"),
        (lambda: SpatialMaxPooling(2, 2, format="CHWN"), "'NCHW' or 'NHWC'"),
        (lambda: Select(0, 1).forward(X), "counted from 1"),
        (lambda: Select(1, 9).forward(X), "no position 9 among 3"),
        (lambda: Mean(4).forward(X), "no axis 4"),
        (lambda: Linear(2, 2).set_weights([np.zeros((2, 2))]), "has 2 arrays"),
        (lambda: Linear(2, 2).set_weights([np.zeros((2, 3)), np.zeros(2)]), "array 0 must have the shape"),
        (lambda: Linear(2, 2, init_weight=np.zeros(3)), "init_weight must have the shape"),
        (lambda: Linear(2, 2, wRegularizer=0.1), "a regularizer must be"),
        (lambda: Sequential().add(Linear(2, 2)).freeze("fc"), "no layer 'fc'"),
        (lambda: ParallelTable().add(Tanh()).forward([X, X]), "takes as many inputs"),
        (lambda: CAddTable().forward(X), "takes a table"),
    ],
)
def test_what_cannot_work_is_said(build: Callable[[], Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build()


def test_arrays_in_arrays_out_with_the_gradients_that_backward_adds_up() -> None:
    layer = Linear(4, 2).set_name("fc")

    output = layer.forward(X)
    gradient = layer.backward(X, np.ones((3, 2)))

    weight, _ = layer.get_weights()
    assert output.dtype == np.float32
    np.testing.assert_allclose(gradient, np.ones((3, 2)) @ weight, rtol=1e-5)
    table = layer.parameters()
    assert set(table.keys()) == {"fc"}
    np.testing.assert_allclose(table["fc"]["gradWeight"], np.ones((2, 3)) @ X, rtol=1e-4)
    np.testing.assert_allclose(table["fc"]["gradBias"], [3.0, 3.0])
    before = layer.get_weights()[1]
    layer.update_parameters(0.5)
    np.testing.assert_allclose(layer.get_weights()[1], before - 1.5, rtol=1e-5)
    layer.zero_grad_parameters()
    assert not layer.parameters()["fc"]["gradBias"].any()


def test_a_layer_is_a_torch_module_and_goes_into_torch_models() -> None:
    model = torch.nn.Sequential(Linear(4, 3), torch.nn.ReLU(), Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    model(torch.tensor(X, dtype=torch.float32)).sum().backward()
    optimizer.step()

    assert len(list(Sequential().add(Linear(4, 3)).add(torch.nn.Linear(3, 2)).parameters())) == 4


def test_weights_begin_as_asked() -> None:
    weight, bias = np.arange(6.0).reshape(2, 3), np.array([1.0, 2.0])
    layer = Linear(3, 2, init_weight=weight, init_bias=bias)
    np.testing.assert_array_equal(layer.get_weights()[0], weight)
    np.testing.assert_array_equal(layer.get_weights()[1], bias)
    layer.set_init_method(Ones(), Zeros())
    np.testing.assert_array_equal(layer.get_weights()[0], np.ones((2, 3)))
    np.testing.assert_array_equal(layer.get_weights()[1], np.zeros(2))
    wide = Linear(400, 300)
    for method, deviation in (
        (ConstInitMethod(0.5), 0.0),
        (RandomNormal(0.0, 0.3), 0.3),
        (RandomUniform(0.6, -0.6), 0.6 / 3**0.5),
        (Xavier(), (2 / 700) ** 0.5),
        (MsraFiller(), (2 / 350) ** 0.5),
        (MsraFiller(False), (2 / 400) ** 0.5),
    ):
        wide.set_init_method(weight_init_method=method)
        assert abs(wide.get_weights()[0].std() - deviation) < 0.01
    full = SpatialFullConvolution(1, 1, 4, 4, 2, 2, 1, 1, no_bias=True)
    full.set_init_method(BilinearFiller())
    np.testing.assert_allclose(full.forward(np.ones((1, 1, 4, 4)))[0, 0, 2:-2, 2:-2], 1.0)
    before = wide.get_weights()[0]
    assert not np.array_equal(wide.reset().get_weights()[0], before)


def test_frozen_layers_are_not_trained_by_name_or_all() -> None:
    model = Sequential().add(Linear(2, 2).set_name("a")).add(Linear(2, 2).set_name("b"))
    model.freeze(["a"])
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, False, True, True]
    model.freeze()
    model.unfreeze("b")
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, False, True, True]


def test_predictions_of_arrays_and_samples_leave_the_mode_as_it_is() -> None:
    model = Sequential().add(Linear(4, 3)).add(Dropout(0.9))
    w, b = model.get_weights()

    predictions = model.predict(X, batch_size=2)
    samples = [Sample.from_ndarray(row, 1.0) for row in X]

    np.testing.assert_allclose(predictions, X @ w.T + b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.predict(samples), predictions, rtol=1e-5)
    np.testing.assert_array_equal(model.predict_class(X), predictions.argmax(1) + 1)
    assert model.is_training()
    assert not model.evaluate().is_training()


def test_a_saved_model_is_read_with_its_structure_weights_names_and_frozen_layers(tmp_path: Any) -> None:
    start = Input("in")
    shared = Linear(4, 4, wRegularizer=L2Regularizer(0.1), init_weight=np.eye(4)).set_name("shared")
    twice = Sequential().add(shared).add(Tanh()).add(shared)
    gated = Highway(4, activation=ReLU())(twice(start))
    model = Model(start, [gated, TimeDistributed(Linear(2, 2))(Reshape([2, 2])(gated))])
    model.freeze("shared")
    before = model.forward(X)

    model.saveModel(str(tmp_path / "model"), over_write=True)
    again = Model.loadModel(str(tmp_path / "model"))

    for one, other in zip(before, again.forward(X), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(again.get_weights()) == len(model.get_weights())  # what is shared is one layer
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.parameters()]
    assert "shared" in again.parameters()
    recurrent = Sequential().add(BiRecurrent(JoinTable(3)).add(LSTM(2, 3))).add(Select(2, -1))
    recurrent.save(str(tmp_path / "recurrent"))
    np.testing.assert_array_equal(
        Layer.load(str(tmp_path / "recurrent")).forward(STEPS), recurrent.forward(STEPS)
    )
    with pytest.raises(ConfigError, match="exists"):
        recurrent.save(str(tmp_path / "recurrent"))
    (tmp_path / "other").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ConfigError, match="is not a model that `saveModel`"):
        Model.loadModel(str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="a ReLU cannot be written"):
        Sequential().add(torch.nn.ReLU()).save(str(tmp_path / "torch"))


def test_tensors_and_samples_have_the_forms_of_bigdl() -> None:
    tensor = JTensor.from_ndarray(X)
    assert tensor is not None
    np.testing.assert_array_equal(tensor.to_ndarray(), X.astype("float32"))
    assert tensor.shape.tolist() == [3, 4]
    assert JTensor.from_ndarray(None) is None
    sparse = JTensor.sparse(np.array([1.0, 2.0]), np.array([[0, 1], [2, 0]]), np.array([2, 3]))
    assert sparse is not None
    np.testing.assert_array_equal(sparse.to_ndarray(), [[0, 0, 1], [2, 0, 0]])
    sample = Sample.from_ndarray([X[0], X[1]], 3)
    assert len(sample.features) == 2
    assert sample.label.to_ndarray().tolist() == [3.0]
    with pytest.raises(ConfigError, match="do not fill the shape"):
        JTensor(np.zeros(3), [2, 2])
