"""Where the rows of a `TFDataset` come from, as data that an `Estimator` takes, without TensorFlow.

RDDs become DataFrames with one binary column a tensor, which costs Spark far less than lists of numbers.
Strings become rows of bytes of equal length, because columns hold numbers; the graph makes strings of them.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kindler.data.tfrecord import records
from kindler.errors import ConfigError, DataError
from kindler.spark.session import running
from kindler.spark.versions import is_connect

_BATCHING = ("BatchDataset", "PaddedBatchDataset", "ParallelBatchDataset", "MapAndBatchDataset")
_REPEATING = ("RepeatDataset", "ShuffleAndRepeatDataset")
LENGTH_BYTES = 4  # bytes before a string that say how long it is


@dataclass(frozen=True)
class TensorMeta:
    dtype: Any
    name: str
    shape: tuple[int | None, ...]


def flatten(structure: Any) -> list[Any]:
    """The leaves, in order, without None."""
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
        raise DataError(f"holds values that {wanted.name} cannot represent.", column=name)
    return cast


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {value.shape}"
    return f"{value!r:.60} of type {type(value).__qualname__}"


@dataclass(frozen=True)
class Columns:
    """Data, and the options that say how `fit`, `evaluate` and `predict` read it."""

    data: Any
    features: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    has_columns: bool = True

    def options(self, *, labels: bool = True) -> dict[str, Any]:
        if not self.has_columns:
            return {}
        names = {*self.features, *(self.labels if labels else ())}
        chosen: dict[str, Any] = {
            "feature_cols": self.features,
            "dtypes": {name: dtype for name, dtype in self.dtypes.items() if name in names},
            "shapes": {name: shape for name, shape in self.shapes.items() if name in names},
        }
        return chosen | ({"label_cols": self.labels} if labels else {})


class Rows:
    predicts = True

    def columns(self, features: Sequence[TensorMeta], labels: Sequence[TensorMeta]) -> Columns:
        """The rows as data; called for every run."""
        raise NotImplementedError


@dataclass(frozen=True)
class ArrayRows(Rows):
    arrays: Sequence[np.ndarray[Any, Any]]

    def columns(self, features: Sequence[TensorMeta], labels: Sequence[TensorMeta]) -> Columns:
        names = column_names(len(features), len(labels))
        by_name = dict(zip(names, self.arrays, strict=True))
        return Columns(
            by_name,
            names[: len(features)],
            names[len(features) :],
            {name: array.dtype.name for name, array in by_name.items()},
        )


@dataclass(frozen=True)
class RddRows(Rows):
    """An RDD whose elements `unpack` takes apart."""

    rdd: Any
    unpack: Unpack

    def columns(self, features: Sequence[TensorMeta], labels: Sequence[TensorMeta]) -> Columns:
        session = require_rdd(self.rdd)
        names = column_names(len(features), len(labels))
        unpack = self.unpack
        metas = [*features, *labels]
        shapes = [meta.shape for meta in metas]
        if any(None in shape for shape in shapes):
            shapes = self._seen_shapes(shapes)
            leaves = tuple(
                (leaf[0], shape, leaf[2]) for leaf, shape in zip(unpack.leaves, shapes, strict=True)
            )
            unpack = Unpack(unpack.structure, leaves, unpack.flat)
        frame = session.createDataFrame(
            self.rdd.map(unpack), ", ".join(f"{name} binary" for name in names), verifySchema=False
        )
        dtypes = {name: leaf[0] for name, leaf in zip(names, unpack.leaves, strict=True)}
        known = {name: tuple(s or 0 for s in shape) for name, shape in zip(names, shapes, strict=True)}
        return Columns(frame, names[: len(features)], names[len(features) :], dtypes, known)

    def _seen_shapes(self, shapes: Sequence[Any]) -> list[Any]:
        first = self.rdd.take(1)
        if not first:
            raise DataError("the RDD has no elements, so the sizes that the dataset leaves open are unknown.")
        seen = [array.shape for array in self.unpack.arrays(first[0])]
        return [given if None not in given else found for given, found in zip(shapes, seen, strict=True)]


@dataclass(frozen=True)
class TextRows(Rows):
    """Strings or bytes: an RDD of them, or a list."""

    items: Any

    def columns(self, features: Sequence[TensorMeta], labels: Sequence[TensorMeta]) -> Columns:
        name = column_names(1, 0)[0]
        if isinstance(self.items, list):
            rows = [as_bytes(item) for item in self.items]
            width = max((len(row) for row in rows), default=0)
            data: Any = {name: np.stack([_padded(row, width) for row in rows])}
        else:
            session = require_rdd(self.items)
            width = self.items.map(lambda item: len(as_bytes(item))).fold(0, max)
            packed = self.items.map(lambda item: (_padded(as_bytes(item), width).tobytes(),))
            data = session.createDataFrame(packed, f"{name} binary", verifySchema=False)
        # Without a shape, so that scoring begins with a real row: graphs parse strings, and zeros are none.
        return Columns(data, [name], [], {name: "uint8"})


@dataclass(frozen=True)
class FrameRows(Rows):
    frame: Any
    features: list[str]
    labels: list[str]
    dtypes: Mapping[str, str]

    def columns(self, features: Sequence[TensorMeta], labels: Sequence[TensorMeta]) -> Columns:
        return Columns(self.frame, self.features, self.labels, dict(self.dtypes))


@dataclass(frozen=True)
class LoaderRows(Rows):
    """Batches that a `tf.data.Dataset` of single rows makes on the workers."""

    dataset: Any
    batch_size: int

    predicts = False

    def columns(self, features: Sequence[TensorMeta], labels: Sequence[TensorMeta]) -> Columns:
        return Columns(self.dataset.batch(self.batch_size), has_columns=False)


def column_names(features: int, labels: int) -> list[str]:
    """Names of the columns that rows without names of their own get."""
    return [
        *(f"feature_{number}" for number in range(features)),
        *(f"label_{number}" for number in range(labels)),
    ]


def as_bytes(item: Any) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, bytes | bytearray | memoryview):
        return bytes(item)
    raise DataError(f"expected strings or bytes; received {item!r:.60} of type {type(item).__qualname__}.")


def require_rdd(rdd: Any) -> Any:
    session = running()
    if session is None or is_connect(session) or not hasattr(rdd, "mapPartitions"):
        connect = session is not None and is_connect(session)
        raise ConfigError(
            f"this factory takes an RDD; received {type(rdd).__qualname__}."
            + (" A Spark Connect session has no RDDs." if connect else "")
            + "\nHint: TFDataset.from_dataframe(df, feature_cols=[...]) takes DataFrames of classic Spark and"
            " Connect."
        )
    return session


def _padded(item: bytes, width: int) -> np.ndarray[Any, Any]:
    row = np.zeros(LENGTH_BYTES + width, np.uint8)
    row[:LENGTH_BYTES] = np.frombuffer(np.uint32(len(item)).tobytes(), np.uint8)
    row[LENGTH_BYTES : LENGTH_BYTES + len(item)] = np.frombuffer(item, np.uint8)
    return row


def refuse_batched(dataset: Any) -> None:
    """Raise for a dataset that has batches already, or no end."""
    for part in _chain(dataset):
        name = type(part).__name__.strip("_")
        if name in _BATCHING:
            raise ConfigError(
                "the tf.data.Dataset is batched; TFDataset creates the batches, from batch_size or"
                " batch_per_thread.\n"
                "Hint: leave out .batch(...), or put .unbatch() behind it."
            )
        if name in _REPEATING:
            raise ConfigError(
                "the tf.data.Dataset repeats; an epoch is one pass over it.\nHint: leave out .repeat()."
            )


def _chain(dataset: Any) -> list[Any]:
    found, waiting = [], [dataset]
    while waiting:
        part = waiting.pop()
        found.append(part)
        if type(part).__name__.strip("_") == "UnbatchDataset":
            continue
        if hasattr(part, "_dataset"):
            waiting.append(part._dataset)  # datasets of TensorFlow 1 wrap those of TensorFlow 2
        else:
            waiting += list(part._inputs())
    return found


def record_rdd(sc: Any, path: str) -> Any:
    files = _files(path)
    if not hasattr(sc, "parallelize"):
        raise ConfigError(
            f"from_tfrecord_file takes a SparkContext first; received {type(sc).__qualname__}.\n"
            "Hint: with Spark Connect, kindler.read_tfrecord reads such files as XShards."
        )
    return sc.parallelize(files, len(files)).flatMap(records)


def _files(path: str) -> list[str]:
    name = os.fspath(path).removeprefix("file://")
    if os.path.isdir(name):
        found = [os.path.join(name, one) for one in os.listdir(name) if not one.startswith((".", "_"))]
    else:
        found = glob.glob(name)
    if not found:
        raise ConfigError(f"from_tfrecord_file: there are no files at {path}.")
    return sorted(os.path.abspath(one) for one in found)
