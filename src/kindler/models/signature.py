"""What a model takes and gives, and the rules by which what was sent becomes what it takes. Pure.

Names must be the model's, but a model with one input takes any name. Values are cast where nothing is lost in
kind: integers to floats, never floats to integers or text to numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kindler.errors import DataError

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Arrays: TypeAlias = dict[str, Array]
DEFAULT_SIGNATURE = "serving_default"  # TensorFlow's name of what a model does if nothing else is asked of it
SIGNATURE_METHOD = "signature:"  # begins the method by which another signature is called


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output.

    Attributes:
        name: Its name.
        dtype: Its numpy dtype; "object" is text or bytes, None any.
        shape: Its shape, rows first; None for a free length. None altogether if it is unknown.
        binary: Whether text is bytes, as in TensorFlow. For all other models text is `str`.
        narrow: Whether whole numbers of few bits may stay what they are, instead of becoming floats: the
            model casts them itself.
    """

    name: str
    dtype: str | None = None
    shape: tuple[int | None, ...] | None = None
    binary: bool = False
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a model.

    Attributes:
        inputs: Its inputs, in order.
        outputs: Its outputs, as far as they are known before the first call.
        columns: The column names of its only input, if it has them.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...] = ()
    columns: tuple[str, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the inputs."""
        return tuple(spec.name for spec in self.inputs)


def signature_from(fields: Mapping[str, Any]) -> Signature:
    """The signature whose `asdict` this is."""

    def specs(side: str) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(**{**spec, "shape": spec["shape"] if spec["shape"] is None else tuple(spec["shape"])})
            for spec in fields[side]
        )

    columns = fields["columns"]
    return Signature(specs("inputs"), specs("outputs"), None if columns is None else tuple(columns))


def example(signature: Signature, rows: int = 1) -> Arrays | None:
    """Example inputs, with rows that differ; None if the signature does not say enough."""
    random = np.random.default_rng(0)
    made: Arrays = {}
    for spec in signature.inputs:
        if spec.shape is None or spec.dtype in (None, "object") or None in spec.shape[1:]:
            return None
        shape = (rows, *(int(n or 1) for n in spec.shape[1:]))
        dtype = np.dtype(spec.dtype)
        if dtype.kind == "f":
            made[spec.name] = random.normal(size=shape).astype(dtype)
            continue
        # Images are of all numbers; 0 and 1 are valid indices of most tables.
        most = 256 if dtype == np.uint8 and len(shape) > 2 else 2
        array = made[spec.name] = random.integers(0, most, shape).astype(dtype)
        if array.size and rows > 1:  # few and small numbers may be the same in both directions
            flat = array.reshape(rows, -1)
            flat[0, 0], flat[-1, 0] = 0, 1
    return made


def fit(signature: Signature, given: Mapping[str, Array]) -> Arrays:
    """The inputs, converted to what the model takes."""
    specs = signature.inputs
    if len(specs) == 1 and len(given) == 1:
        (array,) = given.values()
        fitted = {specs[0].name: _fitted(array, specs[0])}
    else:
        if given.keys() != set(signature.names):
            text = f"the request has {_listed([*given])}" if any(given) else "the request does not name them"
            raise DataError(f"the model takes the inputs {_listed(signature.names)}; {text}.")
        fitted = {spec.name: _fitted(given[spec.name], spec) for spec in specs}
    rows_of(fitted)
    return fitted


def rows_of(arrays: Mapping[str, Array]) -> int:
    """The number of rows of the inputs."""
    counts = {name: array.shape[0] if array.ndim else None for name, array in arrays.items()}
    found = set(counts.values())
    if None in found:
        name = next(name for name, rows in counts.items() if rows is None)
        raise DataError(f"the input {name!r} is one value; its first dimension must be the rows.")
    if len(found) != 1:
        shown = ", ".join(f"{name!r} has {rows}" for name, rows in counts.items())
        raise DataError(f"the inputs have different numbers of rows: {shown}.")
    (rows,) = found
    if not rows:
        raise DataError("there are no rows in the request.")
    return int(rows or 0)


def from_columns(signature: Signature, columns: Mapping[str, Array]) -> Arrays:
    """Named columns of a table as inputs.

    A model whose inputs have the columns' names takes those. Any other model with one input takes all columns
    as one matrix: by the names it was trained with if it has them, else in their order.
    """
    names = signature.names
    if not columns:
        raise DataError("there are no columns in the request.")
    if len(names) > 1:
        return {name: columns[name] for name in names if name in columns} or dict(columns)
    if names[0] in columns and (len(columns) == 1 or columns[names[0]].ndim > 1):
        return {names[0]: columns[names[0]]}
    wanted = signature.columns
    if wanted is not None and len(columns) == 1 and next(iter(columns.values())).ndim > 1:
        wanted = None  # one column that holds whole rows
    if wanted is not None:
        missing = [name for name in wanted if name not in columns]
        if missing:
            raise DataError(
                f"the columns {', '.join(missing)} are missing; the model takes {_listed(wanted)}."
            )
        columns = {name: columns[name] for name in wanted}
    spec = signature.inputs[0]
    return {spec.name: _beside(columns, spec)}


def _beside(columns: Mapping[str, Array], spec: TensorSpec) -> Array:
    arrays = list(columns.values())
    if len(arrays) == 1:
        (only,) = arrays
        flat = only.ndim == 1 and (spec.shape is None or len(spec.shape) > 1)
        return only[:, None] if flat else only
    tall = [name for name, array in columns.items() if array.ndim != 1]
    if tall:
        raise DataError(
            f"the column {tall[0]!r} contains lists, but the model takes its columns as one matrix."
        )
    if len({len(array) for array in arrays}) != 1:
        shown = ", ".join(f"{name!r} has {len(array)}" for name, array in columns.items())
        raise DataError(f"the columns have different numbers of rows: {shown}.")
    if any(array.dtype.kind == "O" for array in arrays):
        arrays = [array.astype(object) for array in arrays]
    return np.stack(arrays, axis=1)


def as_text(array: Array, name: str) -> Array:
    """The same with `str` for every bytes in it; other values stay what they are."""
    if array.dtype.kind not in "OS":
        return array
    items = array.ravel().tolist()
    if not any(type(item) is bytes for item in items):
        return array
    made: Array = np.empty(len(items), dtype=object)
    for i, item in enumerate(items):
        try:
            made[i] = item.decode() if type(item) is bytes else item
        except UnicodeDecodeError as exc:
            raise DataError(
                f"the input {name!r} has bytes that are not valid UTF-8 (value {i}); the model takes text."
            ) from exc
    shaped: Array = made.reshape(array.shape)
    return shaped


def _fitted(array: Array, spec: TensorSpec) -> Array:
    _check_shape(array, spec)
    if not spec.binary:
        array = as_text(array, spec.name)
    if spec.dtype is None:
        return array.astype(object) if array.dtype.kind == "U" else array
    target = np.dtype(spec.dtype)
    if array.dtype == target or (spec.narrow and _is_narrow(array.dtype, target)):
        return array
    if target.kind == "O":
        return array.astype(object)
    if array.dtype.kind in "OUSV" or not _castable(array, target):
        shown = "text, or has nulls" if array.dtype.kind in "OUSV" else array.dtype.name
        if array.dtype.kind in "iu" and array.size:
            shown += f" from {array.min()} to {array.max()}"
        raise DataError(f"the input {spec.name!r} is {shown}, but the model takes {target.name}.")
    with np.errstate(over="ignore"):  # beyond the largest float is infinity, as everywhere
        return array.astype(target)


def _is_narrow(dtype: np.dtype[Any], target: np.dtype[Any]) -> bool:
    return dtype.kind in "iu" and target.kind == "f" and np.can_cast(dtype, target)


def _castable(array: Array, target: np.dtype[Any]) -> bool:
    if array.dtype.kind in "iu" and target.kind in "iu":
        info = np.iinfo(target)
        return not array.size or bool(array.min() >= info.min and array.max() <= info.max)
    if np.can_cast(array.dtype, target, casting="same_kind"):
        return True
    return array.dtype.kind == "b" and target.kind in "iuf"


def _check_shape(array: Array, spec: TensorSpec) -> None:
    wanted = spec.shape
    if wanted is None:
        return
    fits = array.ndim == len(wanted) and all(
        size is None or size == have for size, have in zip(wanted[1:], array.shape[1:], strict=True)
    )
    if not fits:
        sizes = ", ".join(["rows", *("any" if size is None else str(size) for size in wanted[1:])])
        raise DataError(
            f"the input {spec.name!r} has the shape {list(array.shape)}; the model takes [{sizes}]."
        )


def _listed(names: Sequence[str]) -> str:
    shown = [repr(name) for name in names[:10]]
    return ", ".join(shown) + (", ..." if len(names) > 10 else "")
