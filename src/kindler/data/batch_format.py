"""A batch that the user's own code made, as named arrays: which parts are inputs, targets and weights.

Tensors of any framework become numpy arrays, without a copy where they can, by the rules of `columns`.
Where batches come from and who takes which is left to others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kindler.data.columns import Array, Column, conform
from kindler.errors import ConfigError, DataError

WEIGHT = "sample_weight"


@dataclass(frozen=True, slots=True)
class Form:
    """What the batches of a stream consist of.

    Attributes:
        features: Names of the inputs.
        labels: Names of the targets, without the weight.
        weighted: Whether there is a weight per row.
        by_name: Whether the inputs came in a dict.
    """

    features: tuple[str, ...]
    labels: tuple[str, ...]
    weighted: bool
    by_name: bool


@dataclass(frozen=True, slots=True)
class Part:
    """One batch.

    Attributes:
        features: One array an input.
        labels: One array a target; the weight is the last where there is one.
        rows: How many rows it has.
    """

    features: tuple[Array, ...]
    labels: tuple[Array, ...]
    rows: int

    def taken(self, rank: int, size: int) -> Part:
        """The rows of one rank: every size-th."""
        features = tuple(np.ascontiguousarray(array[rank::size]) for array in self.features)
        labels = tuple(np.ascontiguousarray(array[rank::size]) for array in self.labels)
        return Part(features, labels, len(range(rank, self.rows, size)))

    def copied(self) -> Part:
        """The same in memory of its own: models write into their inputs, makers of batches into old ones."""
        features = tuple(np.array(array) for array in self.features)
        return Part(features, tuple(np.array(array) for array in self.labels), self.rows)


@dataclass(frozen=True, slots=True)
class _Named:
    inputs: dict[str, Any]
    targets: dict[str, Any]
    weight: Any
    by_name: bool


def form_of(batch: Any, *, weights: bool) -> Form:
    """What the batches of a stream consist of, by one of them.

    Args:
        batch: `(x, y)`, `(x, y, sample_weight)` or `x`; `{"x": ..., "y": ...}`; x and y are arrays, tuples of
            arrays, or dicts of them.
        weights: Whether a third part is a weight per row. Otherwise the last of several is the target and
            the others are inputs.
    """
    named = _named(batch, weights)
    if not weights and (named.weight is not None or not named.targets):
        what = "a sample_weight" if named.weight is not None else f"inputs {list(named.inputs)} and no target"
        raise ConfigError(
            f"a batch has {what}; the loss of a torch model takes (outputs, targets).\n"
            "Hint: batches are (x, y), or (x0, x1, ..., y) for a model with several inputs."
        )
    return Form(tuple(named.inputs), tuple(named.targets), named.weight is not None, named.by_name)


def read(batch: Any, form: Form, *, weights: bool, allow_nan: bool | Sequence[str], number: int) -> Part:
    """A batch as arrays.

    Args:
        batch: See `form_of`.
        form: What the first batch consisted of.
        weights: As in `form_of`.
        allow_nan: For all arrays, or the names of those where NaN is a value.
        number: Its number in its pass, for complaints.

    Raises:
        DataError: It has other parts than the first, or values that cannot feed a model.
    """
    named = _named(batch, weights)
    actual = Form(tuple(named.inputs), tuple(named.targets), named.weight is not None, named.by_name)
    if actual != form:
        raise DataError(
            f"batch {number} has {_told(actual)} where the first has {_told(form)}; all batches"
            " must have the same structure."
        )
    features = tuple(_array(v, n, "feature", allow_nan, number) for n, v in named.inputs.items())
    labels = tuple(_array(v, n, "label", allow_nan, number) for n, v in named.targets.items())
    if form.weighted:
        labels += (_array(named.weight, WEIGHT, "feature", False, number),)
    lengths = {len(array) for array in (*features, *labels)}
    if len(lengths) > 1:
        raise DataError(f"batch {number} has arrays of different lengths: {sorted(lengths)}.")
    return Part(features, labels, lengths.pop())


def _named(batch: Any, weights: bool) -> _Named:
    x, y, weight = _parted(batch, weights)
    inputs, targets = _several("x", x), {} if y is None else _several("y", y)
    both = sorted(inputs.keys() & targets.keys())
    if both:  # what counts is the order; names only serve models that ask for them
        targets = {f"y_{name}": value for name, value in targets.items()}
    return _Named(inputs, targets, weight, isinstance(x, Mapping))


def _parted(batch: Any, weights: bool) -> tuple[Any, Any, Any]:
    if isinstance(batch, Mapping):
        if "x" in batch and set(batch) <= {"x", "y", WEIGHT}:
            return batch["x"], batch.get("y"), batch.get(WEIGHT)
        return batch, None, None
    if not isinstance(batch, list | tuple):
        return batch, None, None
    parts = tuple(batch)
    if not parts or (weights and len(parts) > 3):
        raise ConfigError(
            f"a batch has {len(parts)} parts; it must be (x, y) or (x, y, sample_weight).\n"
            "Hint: x and y may be tuples or dicts of several arrays."
        )
    if len(parts) == 1:
        return parts[0], None, None
    if len(parts) == 2:
        return parts[0], parts[1], None
    return (parts[0], parts[1], parts[2]) if weights else (parts[:-1], parts[-1], None)


def _several(prefix: str, arrays: Any) -> dict[str, Any]:
    if isinstance(arrays, Mapping):
        return {str(name): value for name, value in arrays.items()}
    if isinstance(arrays, tuple) or (isinstance(arrays, list) and all(hasattr(v, "shape") for v in arrays)):
        parts = list(arrays)
        if len(parts) != 1:
            return {f"{prefix}{place}": value for place, value in enumerate(parts)}
        arrays = parts[0]
    return {prefix: arrays}


def _array(value: Any, name: str, role: Any, allow_nan: bool | Sequence[str], number: int) -> Array:
    array = _numpy(value, name, number)
    if array.ndim == 0:
        raise DataError(
            f"batch {number} has the single value {array!r} there; batches have rows.\n"
            "Hint: batch the dataset, as with dataset.batch(batch_size).",
            column=name,
        )
    nan = allow_nan if isinstance(allow_nan, bool) else name in allow_nan
    column = Column(name=name, role=role, allow_nan=nan)
    return conform(array, column, where=lambda row: f"{row} of batch {number}")


def _numpy(value: Any, name: str, number: int) -> Array:
    """The values of an array, of a tensor of any framework, or of a list of numbers."""
    try:
        if hasattr(value, "detach"):  # torch
            value = value.detach().cpu()
            value = value.float() if "bfloat16" in str(value.dtype) else value
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    except (ValueError, TypeError, RuntimeError) as exc:
        raise DataError(f"batch {number} cannot become an array: {exc}", column=name) from exc
    if array.dtype == object:
        raise DataError(
            f"batch {number} has rows of different lengths, or values that are not numbers; a"
            " batch must be an"
            " array of numbers.\nHint: pad the rows to one length where you create the batches.",
            column=name,
        )
    return array


def _told(form: Form) -> str:
    weight = f" and {WEIGHT}" if form.weighted else ""
    return f"inputs {list(form.features)}, targets {list(form.labels)}{weight}"
