"""Rows of different lengths as one array: filled up behind their values, with a mask that tells which are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from kindler.data.columns import Array, Where
from kindler.data.ragged import Ragged
from kindler.errors import ConfigError, DataError

Pad: TypeAlias = 'Literal["batch"] | int'
PadValue: TypeAlias = "float | int | str"
AsLists: TypeAlias = Literal["always", "never", "lists"]

_IGNORED = -100  # what PyTorch's losses leave out


def rule_for(pad: Any, name: str) -> Any:
    """How this column is padded: "batch", a length, or None."""
    return pad.get(name) if isinstance(pad, Mapping) else pad


def fill_value(given: Any, name: str, rows: Ragged, role: str) -> Any:
    """What a column is filled up with."""
    value = given.get(name) if isinstance(given, Mapping) else given
    if value is not None and not (role == "label" and not isinstance(given, Mapping)):
        return value
    if role == "feature":
        return "" if rows.flat.dtype == object else 0
    if rows.flat.dtype.kind in "iu":
        return _IGNORED
    raise ConfigError(
        f"the rows of the label {name!r} differ in length, and nothing says what they are to be padded with"
        f" so that the loss leaves it out.\nHint: pad_value={{{name!r}: ...}}."
    )


def padded(
    rows: Ragged, pad: Pad, value: Any, *, width: int | None, column: str, where: Where
) -> tuple[Array, Array]:
    """One array of all rows, and a mask that is True where a row has a value of its own.

    Args:
        rows: The rows.
        pad: "batch" or a length.
        value: What to fill up with.
        width: Of "batch", the longest row of the step over all workers, where that is known.
        column: The column's name.
        where: Names a row in complaints.

    Raises:
        DataError: A row is longer than the length that was asked for.
    """
    lengths = rows.lengths
    longest = int(lengths.max(initial=0))
    size = max(1, width or 0, longest) if pad == "batch" else int(pad)
    if longest > size:
        row = int(np.argmax(lengths))
        raise DataError(
            f"has {lengths[row]} values, more than pad={size}.\nHint: cut such rows in a transform, pad to"
            ' more, or pass pad="batch".',
            column=column,
            row=where(row),
        )
    inner = rows.flat.shape[1:]
    array = np.full((len(rows), size, *inner), value, rows.flat.dtype)
    mask: Array = np.arange(size) < lengths[:, None]
    first, last = int(rows.offsets[0]), int(rows.offsets[-1])
    array[mask] = rows.flat[first:last]
    return array, mask


def gathered(values: Any, as_lists: AsLists) -> Ragged | Array | None:
    """The values of rows as one array, or as ragged rows; None if they are neither.

    Args:
        values: One value a row.
        as_lists: Whether rows that could be one array become ragged: "always", "never", or if they are plain
            "lists".
    """
    if isinstance(values, np.ndarray) and as_lists == "never" and values.dtype != object:
        return values
    if isinstance(values[0], str | bytes):
        whole = np.empty(len(values), object)
        whole[:] = values
        return whole
    arrays = [_array(value) for value in values]
    shapes = {array.shape for array in arrays}
    lists = as_lists == "lists" and all(array.ndim == 1 for array in arrays)
    if len(shapes) == 1 and (not arrays[0].ndim or not (lists or as_lists == "always")):
        return np.stack(arrays)
    inner = {array.shape[1:] for array in arrays if array.ndim}
    if len(inner) != 1 or any(not array.ndim for array in arrays) or as_lists == "never":
        return None
    if as_lists == "lists" and not lists:
        return None
    offsets = np.cumsum([0, *(len(array) for array in arrays)]).astype(np.int64)
    filled = [array for array in arrays if len(array)] or arrays[:1]  # an empty list would make floats of all
    flat = np.concatenate(filled)
    return Ragged(flat, offsets, kind=flat.dtype.name, inner=flat.shape[1:])


def _array(value: Any) -> Array:
    """A row's value as an array: of a list, of a framework's tensor, of a list of texts."""
    detach = getattr(value, "detach", None)
    if callable(detach):
        return np.asarray(detach().cpu())
    if isinstance(value, list | tuple) and any(isinstance(item, str) for item in value):
        texts = np.empty(len(value), object)
        texts[:] = value
        return texts
    return np.asarray(value)
