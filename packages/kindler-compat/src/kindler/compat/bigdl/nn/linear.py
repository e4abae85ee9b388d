"""Layers whose weights multiply or add: `Linear`, `LookupTable` and their kin."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kindler.compat.bigdl.nn.base import Layer, uniform
from kindler.errors import DataError

__all__ = [
    "Add",
    "Bilinear",
    "CAdd",
    "CMul",
    "Cosine",
    "Euclidean",
    "Highway",
    "Linear",
    "LookupTable",
    "Maxout",
    "Mul",
    "Scale",
    "SparseLinear",
]

DOUBLEMAX = sys.float_info.max


class Linear(Layer):
    """`x @ weight.T + bias`, with a weight of shape (output_size, input_size).

    Args:
        input_size: Numbers of a row.
        output_size: Numbers of an output row.
        with_bias: Whether there is a bias.
        wRegularizer: Added to the gradient of the weight.
        bRegularizer: Added to that of the bias.
        init_weight: The weight to begin with.
        init_bias: The bias to begin with.
        init_grad_weight: Without effect.
        init_grad_bias: Without effect.
        bigdl_type: Without effect.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        with_bias: bool = True,
        wRegularizer: Any = None,
        bRegularizer: Any = None,
        init_weight: Any = None,
        init_bias: Any = None,
        init_grad_weight: Any = None,
        init_grad_bias: Any = None,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.weight = nn.Parameter(torch.empty(output_size, input_size))
        self.bias = nn.Parameter(torch.empty(output_size)) if with_bias else None
        self.initialize()
        self.start_with(weight=init_weight, bias=init_bias)
        self.regularize(weight=wRegularizer, bias=bRegularizer)
        self.without_effect(init_grad_weight=init_grad_weight, init_grad_bias=init_grad_bias)

    def initialize(self) -> None:
        uniform(self.weight, self.bias, bound=1 / math.sqrt(self.weight.shape[1]))

    def compute(self, value: Any) -> Any:
        return F.linear(value.to(self.weight.dtype), self.weight, self.bias)


class SparseLinear(Linear):
    """`Linear`; rows of sparse tensors come here as dense ones."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        with_bias: bool = True,
        backwardStart: int = -1,
        backwardLength: int = -1,
        wRegularizer: Any = None,
        bRegularizer: Any = None,
        init_weight: Any = None,
        init_bias: Any = None,
        init_grad_weight: Any = None,
        init_grad_bias: Any = None,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            with_bias,
            wRegularizer,
            bRegularizer,
            init_weight,
            init_bias,
            init_grad_weight,
            init_grad_bias,
            bigdl_type,
        )


class LookupTable(Layer):
    """The rows of a weight of shape (n_index, n_output) by their numbers, counted from 1.

    Args:
        n_index: Rows of the weight.
        n_output: Numbers of a row.
        padding_value: A number whose row is not trained; 0 is none.
        max_norm: Rows that are longer are shortened to this norm when they are used.
        norm_type: Which norm.
        should_scale_grad_by_freq: Whether gradients are divided by how often a row is used in a batch.
        wRegularizer: Added to the gradient of the weight.
        bigdl_type: Without effect.
    """

    def __init__(
        self,
        n_index: int,
        n_output: int,
        padding_value: float = 0.0,
        max_norm: float = DOUBLEMAX,
        norm_type: float = 2.0,
        should_scale_grad_by_freq: bool = False,
        wRegularizer: Any = None,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.weight = nn.Parameter(torch.empty(n_index, n_output))
        self.padding = int(padding_value) - 1 if padding_value else None
        self.max_norm = None if max_norm == DOUBLEMAX else float(max_norm)
        self.norm_type, self.by_frequency = float(norm_type), should_scale_grad_by_freq
        self.initialize()
        self.regularize(weight=wRegularizer)

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
        return F.embedding(
            places, self.weight, self.padding, self.max_norm, self.norm_type, self.by_frequency
        )


class CMul(Layer):
    """x times a weight of a shape that repeats along the axes where it has length 1.

    Args:
        size: The weight's shape; the batch is one of its axes unless the input has one axis more.
        wRegularizer: Added to the gradient of the weight.
        bigdl_type: Without effect.
    """

    def __init__(self, size: Sequence[int], wRegularizer: Any = None, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.weight = nn.Parameter(torch.empty(*size))
        self.initialize()
        self.regularize(weight=wRegularizer)

    def initialize(self) -> None:
        uniform(self.weight, bound=1 / math.sqrt(self.weight.numel()))

    def compute(self, value: Any) -> Any:
        return value * self.weight


class CAdd(Layer):
    """x plus a bias of a shape that repeats along the axes where it has length 1."""

    def __init__(self, size: Sequence[int], bRegularizer: Any = None, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.bias = nn.Parameter(torch.empty(*size))
        self.initialize()
        self.regularize(bias=bRegularizer)

    def initialize(self) -> None:
        uniform(self.bias, bound=1 / math.sqrt(self.bias.numel()))

    def compute(self, value: Any) -> Any:
        return value + self.bias


class Scale(Layer):
    """x times a weight plus a bias, both of one shape."""

    def __init__(self, size: Sequence[int], bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.weight = nn.Parameter(torch.empty(*size))
        self.bias = nn.Parameter(torch.empty(*size))
        self.initialize()

    def initialize(self) -> None:
        uniform(self.weight, self.bias, bound=1 / math.sqrt(self.weight.numel()))

    def compute(self, value: Any) -> Any:
        return value * self.weight + self.bias


class Mul(Layer):
    """x times one learned number."""

    def __init__(self, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.weight = nn.Parameter(torch.empty(1))
        self.initialize()

    def initialize(self) -> None:
        uniform(self.weight, bound=1.0)

    def compute(self, value: Any) -> Any:
        return value * self.weight


class Add(Layer):
    """Rows plus a learned bias."""

    def __init__(self, input_size: int, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.bias = nn.Parameter(torch.empty(input_size))
        self.initialize()

    def initialize(self) -> None:
        uniform(self.bias, bound=1 / math.sqrt(self.bias.numel()))

    def compute(self, value: Any) -> Any:
        return value + self.bias


class Bilinear(Layer):
    """`x1 @ weight[k] @ x2 + bias[k]` of a table of two inputs."""

    def __init__(
        self,
        input_size1: int,
        input_size2: int,
        output_size: int,
        bias_res: bool = True,
        wRegularizer: Any = None,
        bRegularizer: Any = None,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.weight = nn.Parameter(torch.empty(output_size, input_size1, input_size2))
        self.bias = nn.Parameter(torch.empty(output_size)) if bias_res else None
        self.initialize()
        self.regularize(weight=wRegularizer, bias=bRegularizer)

    def initialize(self) -> None:
        uniform(self.weight, self.bias, bound=1 / math.sqrt(self.weight.shape[1]))

    def compute(self, value: Any) -> Any:
        return F.bilinear(value[0], value[1], self.weight, self.bias)


class Cosine(Layer):
    """The cosine of the angle between a row and each row of the weight."""

    def __init__(self, input_size: int, output_size: int, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.weight = nn.Parameter(torch.empty(output_size, input_size))
        self.initialize()

    def initialize(self) -> None:
        uniform(self.weight, bound=1 / math.sqrt(self.weight.shape[0]))

    def compute(self, value: Any) -> Any:
        return F.linear(F.normalize(value, dim=-1), F.normalize(self.weight, dim=-1))


class Euclidean(Layer):
    """The distance of a row to each column of a weight of shape (input_size, output_size)."""

    def __init__(
        self, input_size: int, output_size: int, fast_backward: bool = True, bigdl_type: str = "float"
    ) -> None:
        super().__init__(bigdl_type)
        self.weight = nn.Parameter(torch.empty(input_size, output_size))
        self.initialize()

    def initialize(self) -> None:
        uniform(self.weight, bound=1 / math.sqrt(self.weight.shape[0]))

    def compute(self, value: Any) -> Any:
        return (value.unsqueeze(-1) - self.weight).norm(dim=-2)


class Highway(Layer):
    """A gate t between a linear layer and its input: `t * activation(linear(x)) + (1 - t) * x`.

    Args:
        size: Numbers of a row.
        with_bias: Whether gate and layer have a bias.
        activation: A layer; None is none.
        wRegularizer: Added to the gradients of the weights.
        bRegularizer: Added to those of the biases.
        bigdl_type: Without effect.
    """

    def __init__(
        self,
        size: int,
        with_bias: bool = True,
        activation: Any = None,
        wRegularizer: Any = None,
        bRegularizer: Any = None,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.gate = Linear(size, size, with_bias, wRegularizer, bRegularizer)
        self.transform = Linear(size, size, with_bias, wRegularizer, bRegularizer)
        self.activation = activation

    def compute(self, value: Any) -> Any:
        gate, made = torch.sigmoid(self.gate(value)), self.transform(value)
        if self.activation is not None:
            made = self.activation(made)
        return gate * made + (1 - gate) * value


class Maxout(Layer):
    """The largest of `maxout_number` linear outputs."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        maxout_number: int,
        with_bias: bool = True,
        w_regularizer: Any = None,
        b_regularizer: Any = None,
        init_weight: Any = None,
        init_bias: Any = None,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.shape = (maxout_number, output_size)
        self.linear = Linear(
            input_size,
            output_size * maxout_number,
            with_bias,
            w_regularizer,
            b_regularizer,
            init_weight,
            init_bias,
        )

    def compute(self, value: Any) -> Any:
        made = self.linear(value)
        return made.reshape(*made.shape[:-1], *self.shape).amax(-2)
