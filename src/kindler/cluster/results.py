"""What a program answers to rows of an inference, as Arrow columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kindler.errors import DataError

DEFAULT_NAME = "result"


def to_arrow(results: Any, fields: Sequence[pa.Field] | None, *, flat: bool) -> pa.Array:
    """One value for each row: of the field's type, a struct for several fields, a list of it where `flat`.

    Args:
        results: A sequence or an array.
        fields: The columns that were declared; None infers a type.
        flat: Whether each entry is a sequence of results, none of which drops the row.

    Raises:
        DataError: They do not fit.
    """
    kind = None if fields is None else fields[0].type if len(fields) == 1 else pa.struct(list(fields))
    if flat and kind is not None:
        kind = pa.list_(kind)
    try:
        if isinstance(results, np.ndarray) and not flat:
            made = _from_numpy(results)
            return made if kind is None else made.cast(kind)
        several = fields is not None and len(fields) > 1
        values = [_plain(value, fields if several else None, flat) for value in results]
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, ValueError) as exc:
        wanted = "one type" if kind is None else f"the declared type {kind}"
        raise DataError(
            f"batch_results: the results are not of {wanted}: {exc}.\n"
            'Hint: inference(data, schema="name type") declares what a program returns.'
        ) from exc


def columns_of(
    values: pa.Array, fields: Sequence[pa.Field], rows: pa.RecordBatch, *, flat: bool
) -> list[pa.Array]:
    """The rows' own columns, then the results'; where `flat`, a row is repeated for each of its results."""
    own = rows.columns
    if flat:
        parents = pc.list_parent_indices(values)
        own = [column.take(parents) for column in own]
        values = pc.list_flatten(values)
    if len(fields) == 1:
        return [*own, values.cast(fields[0].type)]
    return [*own, *(values.field(number).cast(field.type) for number, field in enumerate(fields))]


def _from_numpy(array: np.ndarray[Any, Any]) -> pa.Array:
    if array.ndim == 1:
        return pa.array(array)
    inner = _from_numpy(np.ascontiguousarray(array).reshape(-1, *array.shape[2:]))
    offsets = np.arange(0, array.shape[0] * array.shape[1] + 1, max(1, array.shape[1]), dtype=np.int32)
    if array.shape[1] == 0:
        offsets = np.zeros(array.shape[0] + 1, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), inner)


def _plain(value: Any, fields: Sequence[pa.Field] | None, flat: bool) -> Any:
    """A result as Arrow takes it: numpy's as Python's, tuples as dicts of the declared columns."""
    if flat:
        if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
            raise ValueError(f"flat_map=True takes a list of results for each row, received {value!r:.100}")
        return [_plain(one, fields, False) for one in value]
    if isinstance(value, np.generic):
        return value.item()
    if fields is not None and not isinstance(value, Mapping):
        if isinstance(value, (str, bytes)) or not hasattr(value, "__len__") or len(value) != len(fields):
            raise ValueError(f"{value!r:.100} has not {len(fields)} values: {[f.name for f in fields]}")
        return {field.name: _plain(one, None, False) for field, one in zip(fields, value, strict=True)}
    if isinstance(value, Mapping):
        return {name: _plain(one, None, False) for name, one in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value
