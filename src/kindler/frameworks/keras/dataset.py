"""A worker's batches as a dataset of `(x, y)` or `(x, y, sample_weight)` for Keras; checks labels by loss."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from kindler.errors import ConfigError
from kindler.frameworks.keras.gradient_hook import mapped
from kindler.frameworks.labels import LabelSource, refuse_non_classes, refuse_non_probabilities

Array = np.ndarray[Any, np.dtype[Any]]


class Arranged:
    def __init__(self, model: Any, *, inputs: str, features: Sequence[str], labels: Sequence[str]) -> None:
        self._features, self._labels = list(features), list(labels)
        self._by_name = inputs == "dict" or (inputs == "auto" and _same(_input_names(model), features))
        self._targets_by_name = _same(list(getattr(model, "output_names", ()) or ()), labels)
        self._shapes = _input_shapes(model, self._features if self._by_name else None)
        self._rules = label_rules(model, self._labels, by_name=self._targets_by_name)

    def inputs(self, features: Sequence[Array]) -> Any:
        if len(self._shapes) == 1 < len(features):
            raise ConfigError(
                f"the model has one input, but there are {len(features)} feature columns: {self._features}.\n"
                "Hint: columns=Columns(stack_features=True) joins the columns into one matrix."
            )
        shapes = self._shapes if len(self._shapes) == len(features) else [None] * len(features)
        shaped = [_shaped(array, shape) for array, shape in zip(features, shapes, strict=True)]
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
        if len(targets) == 1:
            packed += targets
        elif targets:
            by_name = dict(zip(self._labels, targets, strict=True))
            packed.append(by_name if self._targets_by_name else tuple(targets))
        if weights:
            packed += [] if targets else [None]
            packed.append(weights[0].astype(np.float32, copy=False))
        return tuple(packed)


def dataset(keras: Any, backend: str, batch: Callable[[int], Any], steps: int, *, varies: bool) -> Any:
    """Calls `batch` with numbers from 0, from any thread; `varies`: shapes differ from batch to batch."""
    if backend == "tensorflow":
        return _tf_dataset(batch, steps, varies=varies)

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return steps

        def __getitem__(self, number: int) -> Any:
            return batch(number)

    return Batches()


def _tf_dataset(batch: Callable[[int], Any], steps: int, *, varies: bool) -> Any:
    """Maps step numbers to batches: a generator costs half a millisecond per step."""
    import tensorflow as tf

    def tuples(part: Any) -> Any:  # a list would be taken for one tensor
        return tuple(tuples(inner) for inner in part) if isinstance(part, list | tuple) else part

    sample = tuples(batch(0))
    like = tf.nest.flatten(sample)

    def made(number: Any) -> list[Array]:
        return [np.ascontiguousarray(part) for part in tf.nest.flatten(batch(int(number)))]

    def tensors(number: Any) -> Any:
        parts = tf.numpy_function(made, [number], [part.dtype for part in like])
        for part, array in zip(parts, like, strict=True):
            part.set_shape([None] * array.ndim if varies else [None, *array.shape[1:]])
        return tf.nest.pack_sequence_as(sample, parts)

    plain = tf.autograph.experimental.do_not_convert(tensors)  # rewriting it takes a fifth of a second
    batches = with_own_threads(tf.data.Dataset.range(steps).map(plain).prefetch(2))
    options = tf.data.Options()
    options.autotune.enabled = False  # there is nothing to tune, and its thread ends half a second late
    return batches.with_options(options)


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
    if names is not None:
        known = getattr(model, "_inputs_struct", None)
        if not isinstance(known, dict):
            known = dict(zip(_input_names(model), tensors, strict=False))
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
        "Hint: columns=Columns(shapes={column: (...)}) gives a column its shape; feature_cols names inputs."
    )


def with_text(batch: Any) -> Any:
    """Convert text to TensorFlow tensors, the only type that marks it as text."""

    def converted(part: Any) -> Any:
        is_text = isinstance(part, np.ndarray) and part.dtype == object
        return importlib.import_module("tensorflow").constant(part) if is_text else part

    return mapped(batch, converted)


def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    return np.full(shape, "", object) if np.dtype(dtype) == object else np.zeros(shape, dtype)


def label_rules(model: Any, labels: Sequence[str], *, by_name: bool) -> list[Callable[[LabelSource], Any]]:
    names = list(getattr(model, "output_names", None) or ())
    widths = [tensor.shape[-1] if len(tensor.shape) > 1 else None for tensor in _outputs(model)]
    found: list[Callable[[LabelSource], Any]] = []
    for place, label in enumerate(labels):
        output = names.index(label) if by_name else place
        loss = _loss_of(getattr(model, "loss", None), output, names)
        width = widths[output] if output < len(widths) else None
        kind = kind_of(loss)
        if kind == "sparsecategoricalcrossentropy":
            found.append(partial(refuse_non_classes, place=place, classes=width, ignored=_ignored(loss)))
        elif kind in ("binarycrossentropy", "binaryfocalcrossentropy", "bce"):
            found.append(partial(refuse_non_probabilities, place=place))
    return found


def _outputs(model: Any) -> Sequence[Any]:
    try:
        return model.outputs or ()
    except (AttributeError, ValueError):  # a subclass that was never called
        return ()


def _loss_of(loss: Any, output: int, names: Sequence[str]) -> Any:
    if isinstance(loss, Mapping):
        return loss.get(names[output]) if output < len(names) else None
    if isinstance(loss, list | tuple):
        return loss[output] if output < len(loss) else None
    return loss


def kind_of(loss: Any) -> str:
    """ "" if it is not a loss of Keras's own."""
    if isinstance(loss, str):
        return loss.replace("_", "").lower()
    named = loss if hasattr(loss, "__name__") else type(loss)
    own = str(getattr(named, "__module__", "")).partition(".")[0] in ("keras", "tf_keras")
    return named.__name__.replace("_", "").lower() if own else ""


def _ignored(loss: Any) -> int | None:
    options = getattr(loss, "_fn_kwargs", None) or {}
    found: int | None = getattr(loss, "ignore_class", None)
    return options.get("ignore_class") if found is None else found
