"""A worker's batches as a dataset of `(x, y)` or `(x, y, sample_weight)` for Keras."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from kindler.errors import ConfigError
from kindler.frameworks.keras.gradient_hook import HostCode
from kindler.frameworks.keras.label_rules import label_rules
from kindler.frameworks.labels import LabelSource

Array = np.ndarray[Any, np.dtype[Any]]


class Feed(Protocol):
    """Batches by number, counted from 0 within the current epoch."""

    def __len__(self) -> int: ...

    def batch(self, number: int) -> tuple[Sequence[Array], Sequence[Array]]:
        """Features and labels of one step; called from any thread."""


class Remembering(HostCode):
    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed

    def __len__(self) -> int:
        return len(self._feed)

    @property
    def varies(self) -> bool:
        return bool(getattr(self._feed, "varies", False))

    def batch(self, number: int) -> tuple[Sequence[Array], Sequence[Array]]:
        with self.kept():
            return self._feed.batch(number)


class Arranged:
    def __init__(
        self,
        model: Any,
        *,
        inputs: str,
        features: Sequence[str],
        labels: Sequence[str],
    ) -> None:
        self._features, self._labels = list(features), list(labels)
        self._by_name = inputs == "dict" or (inputs == "auto" and _same(_input_names(model), features))
        self._targets_by_name = _same(list(getattr(model, "output_names", ()) or ()), labels)
        self._shapes = _input_shapes(model, self._features if self._by_name else None)
        self._rules = label_rules(model, self._labels, by_name=self._targets_by_name)

    def inputs(self, features: Sequence[Array]) -> Any:
        if len(self._shapes) == 1 < len(features):
            raise ConfigError(
                f"the model has one input, but there are {len(features)} feature columns: {self._features}.\n"
                "Hint: stack_features=True joins the columns to one matrix."
            )
        shaped = [
            _shaped(array, shape) for array, shape in zip(features, self._fitting(features), strict=True)
        ]
        if self._by_name:
            return dict(zip(self._features, shaped, strict=True))
        return shaped[0] if len(shaped) == 1 else tuple(shaped)

    def check(self, labels: tuple[Array, ...], where: Callable[[int], int | str]) -> None:
        source = LabelSource(labels, tuple(self._labels), where)
        for rule in self._rules:
            rule(source)

    def batch(self, features: Sequence[Array], labels: Sequence[Array]) -> tuple[Any, ...]:
        targets, weights = list(labels[: len(self._labels)]), labels[len(self._labels) :]
        packed: list[Any] = [self.inputs(features)]
        if targets:
            packed.append(self._packed_targets(targets))
        if weights:
            packed += [] if targets else [None]
            packed.append(weights[0].astype(np.float32, copy=False))
        return tuple(packed)

    def _packed_targets(self, targets: list[Array]) -> Any:
        if len(targets) == 1:
            return targets[0]
        return dict(zip(self._labels, targets, strict=True)) if self._targets_by_name else tuple(targets)

    def _fitting(self, features: Sequence[Array]) -> Sequence[tuple[int | None, ...] | None]:
        return self._shapes if len(self._shapes) == len(features) else [None] * len(features)


def dataset(keras: Any, backend: str, feed: Feed, arranged: Arranged) -> Any:
    return _mapped(feed, arranged) if backend == "tensorflow" else _py_dataset(keras, feed, arranged)


def _py_dataset(keras: Any, feed: Feed, arranged: Arranged) -> Any:
    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return len(feed)

        def __getitem__(self, number: int) -> Any:
            return arranged.batch(*feed.batch(number))

    return Batches()


def _mapped(feed: Feed, arranged: Arranged) -> Any:
    """Maps step numbers to batches: a generator costs half a millisecond per step."""
    import tensorflow as tf

    def tuples(part: Any) -> Any:  # a list would be taken for one tensor
        return tuple(tuples(inner) for inner in part) if isinstance(part, list | tuple) else part

    sample = tuples(arranged.batch(*feed.batch(0)))
    like = tf.nest.flatten(sample)
    varies = bool(getattr(feed, "varies", False))

    def made(number: Any) -> list[Array]:
        return [np.ascontiguousarray(p) for p in tf.nest.flatten(arranged.batch(*feed.batch(int(number))))]

    def batch(number: Any) -> Any:
        parts = tf.numpy_function(made, [number], [part.dtype for part in like])
        for part, array in zip(parts, like, strict=True):
            part.set_shape([None] * array.ndim if varies else [None, *array.shape[1:]])
        return tf.nest.pack_sequence_as(sample, parts)

    plain = tf.autograph.experimental.do_not_convert(batch)  # rewriting it takes a fifth of a second
    steps = with_own_threads(tf.data.Dataset.range(len(feed)).map(plain).prefetch(2))
    options = tf.data.Options()
    options.autotune.enabled = False  # there is nothing to tune, and its thread ends half a second late
    return steps.with_options(options)


def with_own_threads(made: Any) -> Any:
    """TensorFlow may have a single thread, where a step waiting for a batch would block that batch."""
    import tensorflow as tf

    options = tf.data.Options()
    options.threading.private_threadpool_size = 2
    return made.with_options(options)


def _same(names: Sequence[str], columns: Sequence[str]) -> bool:
    return len(columns) > 1 and sorted(names) == sorted(columns)


def _input_names(model: Any) -> list[str]:
    names = getattr(model, "input_names", None)  # Keras 2
    if names:
        return list(names)
    structure = getattr(model, "_inputs_struct", None)
    if isinstance(structure, dict):
        return list(structure)
    return [tensor.name for tensor in getattr(model, "inputs", None) or ()]


def _input_shapes(model: Any, names: Sequence[str] | None) -> list[tuple[int | None, ...] | None]:
    tensors = getattr(model, "inputs", None) or ()
    structure = getattr(model, "_inputs_struct", None)
    if names is not None:
        known = (
            structure
            if isinstance(structure, dict)
            else dict(zip(_input_names(model), tensors, strict=False))
        )
        tensors = [known.get(name) for name in names]
    return [tuple(tensor.shape[1:]) if tensor is not None else None for tensor in tensors]


def _shaped(array: Array, shape: tuple[int | None, ...] | None) -> Array:
    if shape is None or array.shape[1:] == shape or None in shape:
        return array
    sizes = [int(size) for size in shape if size is not None]
    if int(np.prod(sizes)) == int(np.prod(array.shape[1:])):
        return array.reshape(len(array), *sizes)
    raise ConfigError(
        f"rows of this column have shape {array.shape[1:]}, and the model's input has {shape}.\n"
        "Hint: shapes={column: (...)} gives a column its shape; feature_cols says which columns are inputs."
    )


def with_text(batch: Any) -> Any:
    """Convert text to TensorFlow tensors, the only type that marks it as text."""
    if isinstance(batch, dict):
        return {name: with_text(part) for name, part in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(with_text(part) for part in batch)
    if not isinstance(batch, np.ndarray) or batch.dtype != object:
        return batch
    return importlib.import_module("tensorflow").constant(batch)


def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    return np.full(shape, "", object) if np.dtype(dtype) == object else np.zeros(shape, dtype)
