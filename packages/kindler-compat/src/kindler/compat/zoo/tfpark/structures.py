"""Nested structures of tensors, and rows of data in the same structure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kindler.errors import ConfigError, DataError


@dataclass(frozen=True)
class TensorMeta:
    """What one tensor of a dataset is."""

    dtype: Any
    name: str
    shape: tuple[int | None, ...]


def flatten(structure: Any) -> list[Any]:
    """The leaves, in order; None is no leaf."""
    return list(_leaves(structure))


def _leaves(structure: Any) -> Iterator[Any]:
    if isinstance(structure, Mapping):
        structure = list(structure.values())
    if isinstance(structure, list | tuple):
        for part in structure:
            yield from _leaves(part)
    elif structure is not None:
        yield structure


def pack(structure: Any, leaves: Sequence[Any]) -> Any:
    return _packed(structure, iter(leaves))


def _packed(structure: Any, leaves: Iterator[Any]) -> Any:
    if structure is None:
        return None
    if isinstance(structure, Mapping):
        return {key: _packed(part, leaves) for key, part in structure.items()}
    if isinstance(structure, list | tuple):
        return type(structure)([_packed(part, leaves) for part in structure])
    return next(leaves)


def describe(tf: Any, given: Any, argument: str) -> Any:
    """A structure of `TensorMeta` for (dtype, shape), or a list or dict of such pairs."""
    if isinstance(given, tuple):
        return _meta(tf, given, "input0", argument)
    if isinstance(given, list):
        return [_meta(tf, pair, f"list_input_{number}", argument) for number, pair in enumerate(given)]
    if isinstance(given, Mapping):
        return {key: _meta(tf, pair, str(key), argument) for key, pair in given.items()}
    raise ConfigError(
        f"{argument} must be a tuple (dtype, shape), or a list or a dict of such tuples; received {given!r}."
    )


def metas_of(tf: Any, arrays: Sequence[np.ndarray[Any, Any]]) -> list[TensorMeta]:
    return [
        TensorMeta(tf.as_dtype(array.dtype), f"input_{number}", tuple(array.shape[1:]))
        for number, array in enumerate(arrays)
    ]


def _meta(tf: Any, pair: Any, name: str, argument: str) -> TensorMeta:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise ConfigError(
            f"{argument}: expected (dtype, shape), such as (tf.float32, [28, 28, 1]); received {pair!r}."
        )
    dtype, shape = pair
    sizes = [shape] if isinstance(shape, int) else list(shape)
    return TensorMeta(
        tf.as_dtype(dtype), name, tuple(None if s is None or s == -1 else int(s) for s in sizes)
    )


@dataclass(frozen=True)
class Unpack:
    """Turns an element of an RDD into one bytes object a tensor; runs on the executors.

    `structure` is (features, labels) with names as leaves, and `leaves` the numpy dtype, shape and name of
    each; with `flat`, elements are flat lists of arrays.
    """

    structure: Any
    leaves: tuple[tuple[str, tuple[int | None, ...], str], ...]
    flat: bool = False

    def __call__(self, element: Any) -> tuple[bytes, ...]:
        return tuple(array.tobytes() for array in self.arrays(element))

    def arrays(self, element: Any) -> list[np.ndarray[Any, Any]]:
        """The element's values as arrays of the declared dtypes and shapes."""
        values = self._values(element)
        return [_array(value, *leaf) for value, leaf in zip(values, self.leaves, strict=True)]

    def _values(self, element: Any) -> list[Any]:
        if self.flat:
            if not isinstance(element, list | tuple) or len(element) != len(self.leaves):
                raise DataError(
                    f"an element must be a list of {len(self.leaves)} arrays; received {_kind(element)}."
                )
            return list(element)
        features, labels = self.structure
        if labels is None:
            return _matched(features, _features_of(features, element), "features")
        if not isinstance(element, list | tuple) or len(element) != 2:
            raise DataError(f"an element must be a pair (features, labels); received {_kind(element)}.")
        return [*_matched(features, element[0], "features"), *_matched(labels, element[1], "labels")]


def _features_of(structure: Any, element: Any) -> Any:
    """The features of an element that may be wrapped in a list, or have labels that nobody asked for."""
    if not isinstance(element, list | tuple):
        return element
    if isinstance(structure, list):
        nested = (
            len(element) != len(structure) and len(element) in (1, 2) and isinstance(element[0], list | tuple)
        )
        return element[0] if nested else element
    return element[0] if len(element) in (1, 2) and not np.isscalar(element[0]) else element


def _matched(structure: Any, value: Any, what: str) -> list[Any]:
    if isinstance(structure, Mapping):
        if not isinstance(value, Mapping) or set(structure) - set(value):
            raise DataError(f"{what} must be a dict with {sorted(structure)}; received {_kind(value)}.")
        return [value[key] for key in structure]
    if isinstance(structure, list):
        if not isinstance(value, list | tuple) or len(value) != len(structure):
            raise DataError(f"{what} must be a list of {len(structure)} arrays; received {_kind(value)}.")
        return list(value)
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], np.ndarray):
        value = value[0]
    return [value]


def _array(value: Any, dtype: str, shape: tuple[int | None, ...], name: str) -> np.ndarray[Any, Any]:
    array = np.asarray(value)
    wanted = np.dtype(dtype)
    if array.dtype.kind not in "biuf":
        raise DataError(f"is {_kind(value)}, not numbers.", column=name)
    fits = array.ndim == len(shape) and all(s in (None, n) for n, s in zip(array.shape, shape, strict=True))
    wide = [s for s in shape if s != 1]
    if not fits and None not in shape and [n for n in array.shape if n != 1] == wide:
        array, fits = array.reshape([s or 0 for s in shape]), True  # (n, 1) for (n,), and back
    if not fits:
        raise DataError(f"has rows of shape {array.shape}; the dataset declares {list(shape)}.", column=name)
    if array.dtype == wanted:
        return array
    with np.errstate(invalid="ignore", over="ignore"):
        cast = array.astype(wanted)
    if wanted.kind in "iub" and not np.array_equal(cast.astype(array.dtype), array):
        raise DataError(f"holds values that {wanted.name} does not have.", column=name)
    return cast


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {value.shape}"
    return f"{value!r:.60} of type {type(value).__qualname__}"
