"""Blocks of rows on their way to a node, and the results on their way back.

Frames and tables travel as Arrow record batches, other objects as pickles: the channel is authenticated, and
both ends are the same user's program.
"""

from __future__ import annotations

import pickle
import struct
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kindler.data.columns import Column, complaint, to_numpy
from kindler.errors import DataError
from kindler.frame import Piece

TRAIN, INFER, SPOOL = "train", "infer", "spool"  # what rows are for; those of SPOOL are kept on disk
DEFAULT_NAME = "result"
_BLOCK_BYTES = 1 << 20
_LEAST_ROWS = 16
_SHARE = 16
_ITEMS = 1024  # of a pickled block, at most
_HEADER = struct.Struct("!QQ")

Arrays = dict[str, "np.ndarray[Any, Any]"]


def encode_batches(batches: Iterable[pa.RecordBatch], *, evenly: bool = True) -> Iterator[tuple[int, Piece]]:
    """Split record batches into parts of about a megabyte, as (rows, bytes).

    `evenly` keeps a part to a small share of the rows so far, so that nodes that get parts in turn have about
    the same number of rows.
    """
    sent = 0
    for batch in batches:
        rows, start = batch.num_rows, 0
        fitting = max(1, rows * _BLOCK_BYTES // max(1, batch.nbytes))
        while start < rows:
            part = batch.slice(start, min(max(_LEAST_ROWS, sent // _SHARE), fitting) if evenly else fitting)
            yield part.num_rows, memoryview(part.serialize())
            start += part.num_rows
            sent += part.num_rows


def encode_items(items: Iterator[Any]) -> Iterator[tuple[int, Piece]]:
    step, sent = 1, 0
    while True:
        chunk = list(islice(items, step))
        if not chunk:
            return
        data = cloudpickle.dumps(chunk, protocol=5)
        yield len(chunk), data
        sent += len(chunk)
        fitting = len(chunk) * _BLOCK_BYTES // max(1, len(data))
        step = max(1, min(_ITEMS, max(_LEAST_ROWS, sent // _SHARE), fitting))


def numbered(parts: Iterable[tuple[int, Piece]]) -> Iterator[tuple[Piece, Piece]]:
    """Prefix each part with a header of its row count and block number."""
    for number, (rows, data) in enumerate(parts):
        yield _HEADER.pack(rows, number), data


def row_count(block: Sequence[Piece]) -> int:
    count: int = _HEADER.unpack(block[0])[0]
    return count


def block_number(block: Sequence[Piece]) -> int:
    number: int = _HEADER.unpack(block[0])[1]
    return number


def decode(buffers: Sequence[bytes], schema: pa.Schema | None) -> Block:
    if schema is None:
        return ItemBlock(pickle.loads(buffers[1]))
    return BatchBlock(pa.ipc.read_record_batch(pa.py_buffer(buffers[1]), schema))


class BatchBlock:
    """Decoded rows of a frame or table."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.size: int = batch.num_rows
        self._batch = batch
        self._arrays: Arrays = {}
        self._rows: list[Any] | None = None

    def rows(self, start: int, stop: int) -> list[Any]:
        if self._rows is None:
            kind = _row_type(*self._batch.schema.names)
            columns = [column.to_pylist() for column in self._batch.columns]
            self._rows = list(map(kind._make, zip(*columns, strict=True)))
        return self._rows[start:stop]

    def arrays(self, names: Mapping[str, str], start: int, stop: int) -> Arrays:
        return {name: self._array(column)[start:stop] for column, name in names.items()}

    def _array(self, column: str) -> np.ndarray[Any, Any]:
        if column not in self._arrays:
            if column not in self._batch.schema.names:
                raise DataError(
                    f"the data has no such column; it has {self._batch.schema.names}.", column=column
                )
            values = self._batch.column(column)
            if complaint(values.type) is None:
                wanted = Column(name=column, role="feature", allow_nan=True, dtype=_own_dtype(values.type))
                self._arrays[column] = to_numpy(values, wanted, where=str)
            else:  # text, bytes, and what else is no number
                self._arrays[column] = _objects(values.to_pylist())
        return self._arrays[column]


class ItemBlock:
    def __init__(self, items: list[Any]) -> None:
        self.size = len(items)
        self._items = items

    def rows(self, start: int, stop: int) -> list[Any]:
        return self._items[start:stop]

    def arrays(self, names: Mapping[str, str], start: int, stop: int) -> Arrays:
        chosen = self._items[start:stop]
        for item in chosen:
            if not isinstance(item, (tuple, list)) or len(item) != len(names):
                raise DataError(
                    f"an item of the data is {item!r:.200}, but the input mapping has {len(names)} columns:"
                    f" {list(names)}."
                )
        columns: Any = zip(*chosen, strict=True) if chosen else [[] for _ in names]
        return {name: _array_of(list(values)) for name, values in zip(names.values(), columns, strict=True)}


def _array_of(values: list[Any]) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(values)
    except ValueError:  # ragged
        return _objects(values)


def _objects(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    array = np.empty(len(values), dtype=object)
    for number, value in enumerate(values):  # one by one: numpy would make a matrix of lists
        array[number] = value
    return array


def _own_dtype(kind: pa.DataType) -> str | None:
    """The dtype that keeps floats as they are: float64 stays float64 in the user's own program."""
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return f"float{kind.bit_width}" if pa.types.is_floating(kind) else None


@cache
def _row_type(*names: str) -> Any:
    """A named tuple type; names that Python does not allow are numbered."""
    return namedtuple("Row", names, rename=True)


Block: TypeAlias = BatchBlock | ItemBlock


def to_arrow(results: Any, fields: Sequence[pa.Field] | None, *, flat: bool) -> pa.Array:
    """One value per row: of the field's type, a struct for several fields, a list of it if `flat`."""
    kind = None if fields is None else fields[0].type if len(fields) == 1 else pa.struct(list(fields))
    if flat and kind is not None:
        kind = pa.list_(kind)
    try:
        if isinstance(results, np.ndarray) and not flat:
            array = _column(results, fixed=False)
            return array if kind is None else array.cast(kind)
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
    """The rows' own columns, then the results; if `flat`, a row is repeated for each of its results."""
    own = rows.columns
    if flat:
        parents = pc.list_parent_indices(values)
        own = [column.take(parents) for column in own]
        values = pc.list_flatten(values)
    if len(fields) == 1:
        return [*own, values.cast(fields[0].type)]
    return [*own, *(values.field(number).cast(field.type) for number, field in enumerate(fields))]


def _plain(value: Any, fields: Sequence[pa.Field] | None, flat: bool) -> Any:
    """Convert numpy values to Python's, and tuples to dicts of the declared columns."""
    if flat:
        if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
            raise ValueError(f"flat_map=True needs a list of results for each row, received {value!r:.100}")
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


def table_of(data: Any) -> pa.Table | None:
    """The data as a table, or None for other objects. An array is column "x", a pair "x" and "y"."""
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        return _without_dictionaries(data)
    if type(data).__module__.partition(".")[0] == "pandas" and hasattr(data, "columns"):
        return _without_dictionaries(pa.Table.from_pandas(data, preserve_index=False))
    if isinstance(data, np.ndarray):
        return _of_arrays({"x": data})
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, np.ndarray) for part in data):
        return _of_arrays({"x": data[0], "y": data[1]})
    if isinstance(data, Mapping):
        return _of_arrays({str(name): np.asarray(values) for name, values in data.items()})
    return None


def _of_arrays(arrays: Mapping[str, np.ndarray[Any, Any]]) -> pa.Table:
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        raise DataError(f"all arrays of a data set must have the same length; received {sizes}.")
    return pa.table({name: _column(array, fixed=True) for name, array in arrays.items()})


def _column(array: np.ndarray[Any, Any], *, fixed: bool) -> pa.Array:
    """Of more than one dimension, lists of lists; Spark has no type for those of a fixed size."""
    if array.ndim <= 1:
        return pa.array(array)
    inner = _column(np.ascontiguousarray(array).reshape(-1, *array.shape[2:]), fixed=fixed)
    if fixed:
        return pa.FixedSizeListArray.from_arrays(inner, array.shape[1])
    offsets = np.arange(array.shape[0] + 1, dtype=np.int32) * np.int32(array.shape[1])
    return pa.ListArray.from_arrays(pa.array(offsets), inner)


def _without_dictionaries(table: pa.Table) -> pa.Table:
    """Replace categories by their values: a block has no room for a dictionary."""
    for number, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(number, field.name, table.column(number).cast(field.type.value_type))
    return table
