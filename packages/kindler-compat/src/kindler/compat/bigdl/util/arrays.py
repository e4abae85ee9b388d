"""`JTensor` and `Sample`, in which BigDL's programs pass arrays around, and the numbers that layers draw.

Neither torch nor Spark is needed for them, so that executors can make them. Once they are seeded, numbers are
those of BigDL, which takes 32 bits of a Mersenne twister for each, so that the same seed gives its weights.
Without a seed, torch's generator draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kindler.errors import ConfigError

Array = np.ndarray[Any, Any]


class JTensor:
    """An array of float32, dense or sparse.

    Args:
        storage: The values, in the order of rows.
        shape: The shape.
        bigdl_type: Without effect.
        indices: Of a sparse tensor: an array with a row for each axis, whose columns are the places of the
            values, counted from 0.
    """

    def __init__(self, storage: Any, shape: Any, bigdl_type: str = "float", indices: Any = None) -> None:
        values = np.asarray(storage)
        self.storage: Array = values.astype(np.float32).reshape(-1)
        if values.dtype.kind in "iu" and values.size and not (self.storage == values.reshape(-1)).all():
            raise ConfigError(
                "JTensor: whole numbers above 16777216 (2 to the power of 24) may not fit float32; received"
                f" {values.max()}."
            )
        self.shape: Array = np.asarray(shape, dtype=np.int64).reshape(-1)
        self.indices: Array | None = None if indices is None else np.asarray(indices, dtype=np.int64)
        self.bigdl_type = bigdl_type
        if self.indices is None and self.storage.size != int(self.shape.prod()):
            raise ConfigError(
                f"JTensor: {self.storage.size} values do not fill the shape {tuple(self.shape)}."
            )
        if self.indices is not None and self.indices.shape != (self.shape.size, self.storage.size):
            raise ConfigError(
                f"JTensor: indices must have the shape {(self.shape.size, self.storage.size)}: a row for each"
                f" axis, a column for each value; received {self.indices.shape}."
            )

    @classmethod
    def from_ndarray(cls, a_ndarray: Any, bigdl_type: str = "float") -> JTensor | None:
        """A tensor of an array; None gives None."""
        if a_ndarray is None:
            return None
        array = np.asarray(a_ndarray)
        return cls(array, array.shape or (1,), bigdl_type)

    @classmethod
    def sparse(cls, a_ndarray: Any, i_ndarray: Any, shape: Any, bigdl_type: str = "float") -> JTensor | None:
        """A sparse tensor of values, their places and a shape."""
        return None if a_ndarray is None else cls(a_ndarray, shape, bigdl_type, i_ndarray)

    def to_ndarray(self) -> Array:
        """The values as an array; those that a sparse tensor does not have are 0."""
        if self.indices is None:
            return self.storage.reshape(tuple(self.shape))
        dense = np.zeros(tuple(self.shape), dtype=np.float32)
        np.add.at(dense, tuple(self.indices), self.storage)
        return dense

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array = self.to_ndarray()
        return array.copy() if dtype is None and copy else array if dtype is None else array.astype(dtype)

    def __repr__(self) -> str:
        kind = "JTensor" if self.indices is None else "SparseJTensor"
        return f"{kind}: storage: {self.storage}, shape: {self.shape}"


class Sample:
    """The features and labels of one row, each a list of `JTensor`s."""

    def __init__(self, features: Any, labels: Any = None, bigdl_type: str = "float") -> None:
        self.features: list[JTensor] = _tensors(features)
        self.labels: list[JTensor] = _tensors(labels)
        self.bigdl_type = bigdl_type

    @classmethod
    def from_ndarray(cls, features: Any, labels: Any = None, bigdl_type: str = "float") -> Sample:
        """A sample of arrays or numbers, or of lists of them for a model of several inputs."""
        return cls(features, labels, bigdl_type)

    @classmethod
    def from_jtensor(cls, features: Any, labels: Any, bigdl_type: str = "float") -> Sample:
        return cls(features, labels, bigdl_type)

    @property
    def feature(self) -> JTensor:
        return self.features[0]

    @property
    def label(self) -> JTensor:
        return self.labels[0]

    def __repr__(self) -> str:
        return f"Sample: features: {self.features}, labels: {self.labels},"


def _tensors(value: Any) -> list[JTensor]:
    several: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    tensors = [part if isinstance(part, JTensor) else JTensor.from_ndarray(part) for part in several]
    return [tensor for tensor in tensors if tensor is not None]


_twister: list[np.random.RandomState] = []


class RNG:
    """BigDL's random numbers."""

    def __init__(self, bigdl_type: str = "float") -> None: ...

    def set_seed(self, seed: int) -> None:
        """Seed the numbers, also those that new layers draw their weights from."""
        set_seed(seed)

    def uniform(self, a: float, b: float, size: Sequence[int]) -> Array:
        numbers = _numbers(_twister[0] if _twister else np.random.RandomState(), int(np.prod(size)))
        return (numbers * (b - a) + a).astype(np.float32).reshape(size)


def set_seed(seed: int) -> None:
    """Seed the numbers that new layers draw their weights from."""
    import torch

    torch.manual_seed(seed)  # for what is not uniform
    _twister[:] = [np.random.RandomState(seed)]


def fill_uniform(tensor: Any, low: float, high: float) -> None:
    """Draw a tensor of torch between two limits."""
    if not _twister:
        tensor.uniform_(low, high)
        return
    numbers = _numbers(_twister[0], tensor.numel()) * (high - low) + low
    tensor.copy_(tensor.new_tensor(numbers).reshape(tensor.shape))


@contextmanager
def undrawn() -> Iterator[None]:
    """Numbers that are drawn within are drawn again after it."""
    states = [twister.get_state() for twister in _twister]
    yield
    for twister, state in zip(_twister, states, strict=True):
        twister.set_state(state)


def _numbers(twister: np.random.RandomState, count: int) -> Array:
    return np.asarray(twister.randint(0, 2**32, size=count, dtype=np.uint64) / 2**32)
