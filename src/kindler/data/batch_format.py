"""Parses batches made by user code into named inputs, targets and weights, as numpy arrays."""

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
    features: tuple[str, ...]
    labels: tuple[str, ...]
    weighted: bool
    by_name: bool


@dataclass(frozen=True, slots=True)
class Part:
    """One batch; the weight, if any, is the last label."""

    features: tuple[Array, ...]
    labels: tuple[Array, ...]
    rows: int

    def taken(self, rank: int, size: int) -> Part:
        """Copies of every `size`-th row: models write into their inputs, and batch makers reuse buffers."""
        features, labels = (
            tuple(np.array(array[rank::size], order="C") for array in arrays)
            for arrays in (self.features, self.labels)
        )
        return Part(features, labels, len(range(rank, self.rows, size)))


def form_of(batch: Any, *, weights: bool) -> Form:
    """With `weights`, a third part is a weight per row; else the last part is the only target."""
    form, _, _, _ = _named(batch, weights)
    if not weights and (form.weighted or not form.labels):
        what = "a sample_weight" if form.weighted else f"inputs {list(form.features)} and no target"
        raise ConfigError(
            f"a batch has {what}; the loss of a torch model takes (outputs, targets).\n"
            "Hint: batches are (x, y), or (x0, x1, ..., y) for a model with several inputs."
        )
    return form


def read(batch: Any, form: Form, *, weights: bool, allow_nan: bool | Sequence[str], number: int) -> Part:
    actual, inputs, targets, weight = _named(batch, weights)
    if actual != form:
        raise DataError(
            f"batch {number} has {_describe(actual)} where the first has {_describe(form)}; all batches"
            " must have the same structure."
        )
    features = tuple(_array(v, n, "feature", allow_nan, number) for n, v in inputs.items())
    labels = tuple(_array(v, n, "label", allow_nan, number) for n, v in targets.items())
    if form.weighted:
        labels += (_array(weight, WEIGHT, "feature", False, number),)
    lengths = {len(array) for array in (*features, *labels)}
    if len(lengths) > 1:
        raise DataError(f"batch {number} has arrays of different lengths: {sorted(lengths)}.")
    return Part(features, labels, lengths.pop())


def _named(batch: Any, weights: bool) -> tuple[Form, dict[str, Any], dict[str, Any], Any]:
    x, y, weight = _parted(batch, weights)
    inputs, targets = _several("x", x), {} if y is None else _several("y", y)
    both = sorted(inputs.keys() & targets.keys())
    if both:  # what counts is the order; names only serve models that ask for them
        targets = {f"y_{name}": value for name, value in targets.items()}
    form = Form(tuple(inputs), tuple(targets), weight is not None, isinstance(x, Mapping))
    return form, inputs, targets, weight


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
    try:
        if hasattr(value, "detach"):  # torch
            value = value.detach().cpu()
            value = value.float() if "bfloat16" in str(value.dtype) else value
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    except (ValueError, TypeError, RuntimeError) as exc:
        raise DataError(f"batch {number} cannot become an array: {exc}", column=name) from exc
    if array.dtype == object:
        raise DataError(
            f"batch {number} has rows of different lengths, or values that are not numbers; a batch must be"
            " an array of numbers.\nHint: pad the rows to one length where you create the batches.",
            column=name,
        )
    return array


def _describe(form: Form) -> str:
    weight = f" and {WEIGHT}" if form.weighted else ""
    return f"inputs {list(form.features)}, targets {list(form.labels)}{weight}"
