"""Steps of preprocessing, and `FeatureSet`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kindler.compat.bigdl.util.arrays import JTensor, Sample
from kindler.compat.zoo.tfpark.rows import RddRows, Rows, require_rdd
from kindler.compat.zoo.tfpark.structures import Unpack
from kindler.errors import ConfigError

__all__ = [
    "ArrayToTensor",
    "ChainedPreprocessing",
    "FeatureLabelPreprocessing",
    "FeatureSet",
    "MLlibVectorToTensor",
    "Preprocessing",
    "Sample",
    "ScalarToTensor",
    "SeqToMultipleTensors",
    "SeqToTensor",
    "TensorToSample",
]


class Preprocessing:
    """A step of preprocessing: called with an item, it returns the item to go on with."""

    def __call__(self, item: Any) -> Any:
        raise NotImplementedError


class ChainedPreprocessing(Preprocessing):
    """Several steps, one after the other."""

    def __init__(self, transformers: Sequence[Callable[[Any], Any]], bigdl_type: str = "float") -> None:
        wrong = [step for step in transformers if not callable(step)]
        if wrong:
            raise ConfigError(f"ChainedPreprocessing takes steps of preprocessing; received {wrong[0]!r}.")
        self.transformers = list(transformers)

    def __call__(self, item: Any) -> Any:
        for step in self.transformers:
            item = step(item)
        return item


class SeqToTensor(Preprocessing):
    """The numbers of a row as an array of a shape.

    Args:
        size: The shape; empty leaves it as it is.
        bigdl_type: Without effect.
    """

    def __init__(self, size: Sequence[int] = (), bigdl_type: str = "float") -> None:
        self.size = tuple(int(length) for length in size)

    def __call__(self, item: Any) -> Any:
        array = np.asarray(item, dtype=np.float32)
        return array.reshape(self.size) if self.size else array


class ArrayToTensor(SeqToTensor):
    """The same as `SeqToTensor`."""


class MLlibVectorToTensor(SeqToTensor):
    """A vector of Spark ML as an array of a shape."""

    def __call__(self, item: Any) -> Any:
        return super().__call__(item.toArray() if hasattr(item, "toArray") else item)


class ScalarToTensor(SeqToTensor):
    """A number as an array of length 1."""

    def __init__(self, bigdl_type: str = "float") -> None:
        super().__init__((1,))


class SeqToMultipleTensors(Preprocessing):
    """The numbers of a row cut into several arrays, for a model of several inputs.

    Args:
        size: The shape of each.
        bigdl_type: Without effect.
    """

    def __init__(self, size: Sequence[Sequence[int]] = (), bigdl_type: str = "float") -> None:
        self.sizes = [tuple(int(length) for length in shape) for shape in size]

    def __call__(self, item: Any) -> Any:
        flat, arrays, start = np.asarray(item, dtype=np.float32).reshape(-1), [], 0
        for shape in self.sizes:
            end = start + int(np.prod(shape))
            arrays.append(flat[start:end].reshape(shape))
            start = end
        return arrays


class FeatureLabelPreprocessing(Preprocessing):
    """One step for features and another one for labels."""

    def __init__(
        self,
        feature_transformer: Callable[[Any], Any],
        label_transformer: Callable[[Any], Any],
        bigdl_type: str = "float",
    ) -> None:
        self.feature_transformer, self.label_transformer = feature_transformer, label_transformer

    def __call__(self, item: Any) -> Sample:
        features, labels = item
        return Sample(self.feature_transformer(features), self.label_transformer(labels))


class TensorToSample(Preprocessing):
    """An array as a sample without labels."""

    def __init__(self, bigdl_type: str = "float") -> None: ...

    def __call__(self, item: Any) -> Sample:
        return Sample(item)


class FeatureSet:
    """Elements of an RDD with their preprocessing, to train on.

    Create one with `FeatureSet.rdd`, `FeatureSet.sample_rdd` or `FeatureSet.image_frame`.
    """

    def __init__(self, rdd: Any, steps: Sequence[Callable[[Any], Any]] = (), shuffled: bool = True) -> None:
        require_rdd(rdd)
        self._rdd, self._steps, self.shuffled = rdd, tuple(steps), shuffled

    @classmethod
    def rdd(
        cls, rdd: Any, memory_type: str = "DRAM", sequential_order: bool = False, shuffle: bool = True
    ) -> FeatureSet:
        """A set of the elements of an RDD: pairs of features and labels, once they are preprocessed.

        Args:
            rdd: The RDD.
            memory_type: Without effect: rows are kept in files that are mapped into memory.
            sequential_order: Whether rows are trained on in their order.
            shuffle: Whether each epoch has an order of its own.
        """
        return cls(rdd, shuffled=shuffle and not sequential_order)

    sample_rdd = rdd

    @classmethod
    def image_frame(
        cls, image_frame: Any, memory_type: str = "DRAM", sequential_order: bool = False, shuffle: bool = True
    ) -> FeatureSet:
        """A set of the images of an `ImageSet`; see `rdd`."""
        return cls(image_frame.rdd, image_frame.steps, shuffle and not sequential_order)

    image_set = image_frame

    def transform(self, transformer: Callable[[Any], Any]) -> FeatureSet:
        """The set after a step of preprocessing."""
        return FeatureSet(self._rdd, (*self._steps, transformer), self.shuffled)

    def to_dataset(self) -> FeatureSet:
        """The set itself, as `TFDataset.from_feature_set` takes it."""
        return self

    def sample_rows(self, unpack: Unpack, *, labelled: bool) -> Rows:
        return RddRows(self._rdd.map(ToPair(ChainedPreprocessing(self._steps), labelled)), unpack)


class ToPair:
    """Preprocesses an item and takes its features and labels; runs on the executors."""

    def __init__(self, steps: Callable[[Any], Any], labelled: bool) -> None:
        self.steps, self.labelled = steps, labelled

    def __call__(self, item: Any) -> Any:
        made = self.steps(item)
        sample = made.get("sample", made) if isinstance(made, dict) else made
        if isinstance(sample, Sample):
            features, labels = _arrays(sample.features), _arrays(sample.labels)
            return (features, labels) if self.labelled else features
        return sample


def _arrays(tensors: Sequence[JTensor]) -> Any:
    """The arrays of a sample: one, or a list of them."""
    found = [tensor.to_ndarray() for tensor in tensors]
    return found[0] if len(found) == 1 else found
