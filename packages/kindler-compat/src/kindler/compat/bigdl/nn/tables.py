"""Layers that take or return tables, which are lists of tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch.nn import functional as F

from kindler.compat.bigdl.nn.axes import axis_of, place_of
from kindler.compat.bigdl.nn.base import Layer
from kindler.errors import ConfigError

__all__ = [
    "MM",
    "MV",
    "CAddTable",
    "CAveTable",
    "CDivTable",
    "CMaxTable",
    "CMinTable",
    "CMulTable",
    "CSubTable",
    "CosineDistance",
    "CrossProduct",
    "DotProduct",
    "FlattenTable",
    "Index",
    "JoinTable",
    "MaskedSelect",
    "MixtureTable",
    "NarrowTable",
    "Pack",
    "PairwiseDistance",
    "SelectTable",
    "SplitTable",
]


class JoinTable(Layer):
    """The tensors of a table joined along an axis.

    Args:
        dimension: The axis, counted from 1.
        n_input_dims: Axes of a row, where `dimension` counts those; a tensor with one more is a batch.
        bigdl_type: Without effect.
    """

    def __init__(self, dimension: int, n_input_dims: int = -1, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.dimension, self.n_input_dims = dimension, n_input_dims

    def compute(self, value: Any) -> Any:
        return torch.cat(value, axis_of(self.dimension, value[0], self.n_input_dims))


class SplitTable(Layer):
    """The table of the slices along an axis."""

    def __init__(self, dimension: int, n_input_dims: int = -1, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.dimension, self.n_input_dims = dimension, n_input_dims

    def compute(self, value: Any) -> Any:
        return list(value.unbind(axis_of(self.dimension, value, self.n_input_dims)))


class Pack(Layer):
    """The tensors of a table along a new axis."""

    def __init__(self, dimension: int, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.dimension = dimension

    def compute(self, value: Any) -> Any:
        several = value if isinstance(value, list) else [value]
        return torch.stack(several, self.dimension - 1 if self.dimension > 0 else self.dimension)


class SelectTable(Layer):
    """One element of a table, counted from 1; negative numbers count from the last."""

    def __init__(self, index: int, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.index = index

    def compute(self, value: Any) -> Any:
        return value[place_of(self.index, len(value))]


class NarrowTable(Layer):
    """A part of a table: `length` elements from `offset` on; -1 is all that follow."""

    def __init__(self, offset: int, length: int = 1, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.offset, self.length = offset, length

    def compute(self, value: Any) -> Any:
        first = place_of(self.offset, len(value))
        end = first + self.length if self.length > 0 else len(value) + self.length + 1
        return list(value[first:end])


class FlattenTable(Layer):
    """A table of tables as one table."""

    def compute(self, value: Any) -> Any:
        return [leaf for part in value for leaf in (self.compute(part) if isinstance(part, list) else [part])]


class _Elementwise(Layer):
    """Folds the tensors of a table with a function of two."""

    fold: Callable[[Any, Any], Any]

    def compute(self, value: Any) -> Any:
        if not isinstance(value, list):
            raise ConfigError(f"{type(self).__name__} takes a table of tensors; received a single tensor.")
        return reduce(type(self).fold, value)


class CAddTable(_Elementwise):
    """The sum of the tensors of a table."""

    fold = staticmethod(torch.add)

    def __init__(self, inplace: bool = False, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)


class CSubTable(_Elementwise):
    """The first tensor minus the second."""

    fold = staticmethod(torch.sub)


class CMulTable(_Elementwise):
    """The product of the tensors of a table, element by element."""

    fold = staticmethod(torch.mul)


class CDivTable(_Elementwise):
    """The first tensor over the second, element by element."""

    fold = staticmethod(torch.div)


class CMaxTable(_Elementwise):
    """The largest of the tensors of a table, element by element."""

    fold = staticmethod(torch.maximum)


class CMinTable(_Elementwise):
    """The smallest of the tensors of a table, element by element."""

    fold = staticmethod(torch.minimum)


class CAveTable(Layer):
    """The mean of the tensors of a table."""

    def __init__(self, inplace: bool = False, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)

    def compute(self, value: Any) -> Any:
        return reduce(torch.add, value) / len(value)


class DotProduct(Layer):
    """The dot products of the rows of two tensors."""

    def compute(self, value: Any) -> Any:
        return (value[0] * value[1]).sum(-1)


class CrossProduct(Layer):
    """The dot products of the rows of each pair of tensors of a table.

    Args:
        numTensor: How many tensors the table has; 0 is any.
        embeddingSize: Numbers of a row; 0 is any.
        bigdl_type: Without effect.
    """

    def __init__(self, numTensor: int = 0, embeddingSize: int = 0, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.count, self.width = numTensor, embeddingSize

    def compute(self, value: Any) -> Any:
        if self.count and len(value) != self.count:
            raise ConfigError(f"CrossProduct(numTensor={self.count}) received {len(value)} tensors.")
        if self.width and value[0].shape[-1] != self.width:
            raise ConfigError(
                f"CrossProduct(embeddingSize={self.width}) received rows of {value[0].shape[-1]}."
            )
        pairs = [(a, b) for place, a in enumerate(value) for b in value[place + 1 :]]
        return torch.stack([(a * b).sum(-1) for a, b in pairs], -1)


class CosineDistance(Layer):
    """The cosine of the angle between the rows of two tensors."""

    def compute(self, value: Any) -> Any:
        made = F.cosine_similarity(value[0], value[1], -1)
        return made.unsqueeze(-1) if made.dim() else made.reshape(1)


class PairwiseDistance(Layer):
    """The distance between the rows of two tensors, in the p-norm."""

    def __init__(self, norm: float = 2, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.norm = float(norm)

    def compute(self, value: Any) -> Any:
        return (value[0] - value[1]).norm(self.norm, -1, keepdim=True)


class MM(Layer):
    """The product of two matrices, or of the matrices of two batches."""

    def __init__(self, trans_a: bool = False, trans_b: bool = False, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.trans_a, self.trans_b = trans_a, trans_b

    def compute(self, value: Any) -> Any:
        first, second = value
        first = first.transpose(-1, -2) if self.trans_a else first
        second = second.transpose(-1, -2) if self.trans_b else second
        return first @ second


class MV(Layer):
    """The product of a matrix and a vector, or of those of two batches."""

    def __init__(self, trans: bool = False, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.trans = trans

    def compute(self, value: Any) -> Any:
        matrix = value[0].transpose(-1, -2) if self.trans else value[0]
        return (matrix @ value[1].unsqueeze(-1)).squeeze(-1)


class Index(Layer):
    """The places of the first tensor along an axis that the second one names, counted from 1."""

    def __init__(self, dimension: int, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.dimension = dimension

    def compute(self, value: Any) -> Any:
        return value[0].index_select(axis_of(self.dimension, value[0]), value[1].long() - 1)


class MaskedSelect(Layer):
    """The values of the first tensor where the second one is not 0."""

    def compute(self, value: Any) -> Any:
        return value[0].masked_select(value[1] != 0)


class MixtureTable(Layer):
    """The second element, a table of tensors, weighted by the columns of the first.

    Args:
        dim: Where the second element is one tensor: its axis of experts, counted from 1; the default is 2.
        bigdl_type: Without effect.
    """

    def __init__(self, dim: int = 2**31 - 1, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.axis = 1 if dim == 2**31 - 1 else dim - 1

    def compute(self, value: Any) -> Any:
        gates, experts = value
        stacked = torch.stack(experts, 1) if isinstance(experts, list) else experts.movedim(self.axis, 1)
        return (gates.reshape(*gates.shape, *[1] * (stacked.dim() - 2)) * stacked).sum(1)
