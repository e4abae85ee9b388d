"""A block of rows on its way to a node, and as the program reads it.

Rows of frames and tables travel as Arrow record batches; other objects, as RDDs and lists have them, as
pickles. The channel is authenticated, and both ends are the same user's program.
"""

from __future__ import annotations

import pickle
import struct
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import cloudpickle
import numpy as np
import pyarrow as pa

from kindler.data.columns import Column, complaint, to_numpy
from kindler.engine.frames import Piece
from kindler.errors import DataError

__all__ = [
    "ARROW",
    "PICKLE",
    "Block",
    "block_number",
    "block_of",
    "decode",
    "encode_batches",
    "encode_items",
    "numbered",
    "row_count",
]

ARROW, PICKLE = "arrow", "pickle"
_BLOCK_BYTES = 1 << 20
_LEAST_ROWS = 16
_SHARE = 16
_ITEMS = 1024  # of a pickled block, at most
_HEADER = struct.Struct("!QQ")

Arrays = dict[str, "np.ndarray[Any, Any]"]


class Block(Protocol):
    """Decoded rows."""

    size: int

    def rows(self, start: int, stop: int) -> list[Any]:
        """Some of them as Python objects."""

    def arrays(self, names: Mapping[str, str], start: int, stop: int) -> Arrays:
        """Some of them as an array for each column in `names`, under the name given there."""


def encode_batches(batches: Iterable[pa.RecordBatch], *, evenly: bool = True) -> Iterator[tuple[int, Piece]]:
    """Record batches in parts of about a megabyte: how many rows each has, and its bytes.

    Args:
        batches: The batches.
        evenly: Whether no part has more than a small share of the rows so far: whichever is the last, several
            nodes that get parts in turn have about the same number of rows.
    """
    sent = 0
    for batch in batches:
        rows, start = batch.num_rows, 0
        fitting = max(1, rows * _BLOCK_BYTES // max(1, batch.nbytes))
        while start < rows:
            part = batch.slice(start, min(_share(sent), fitting) if evenly else fitting)
            yield part.num_rows, memoryview(part.serialize())
            start += part.num_rows
            sent += part.num_rows


def _share(sent: int) -> int:
    return max(_LEAST_ROWS, sent // _SHARE)


def encode_items(items: Iterator[Any]) -> Iterator[tuple[int, Piece]]:
    """Any objects, in parts as well."""
    step, sent = 1, 0
    while True:
        chunk = [item for _, item in zip(range(step), items, strict=False)]
        if not chunk:
            return
        data = cloudpickle.dumps(chunk, protocol=5)
        yield len(chunk), data
        sent += len(chunk)
        step = max(1, min(_ITEMS, _share(sent), len(chunk) * _BLOCK_BYTES // max(1, len(data))))


def numbered(parts: Iterable[tuple[int, Piece]]) -> Iterator[tuple[Piece, Piece]]:
    """The blocks of a partition: a header with the number of rows and of the block, and the bytes."""
    for number, (rows, data) in enumerate(parts):
        yield _HEADER.pack(rows, number), data


def row_count(block: Sequence[Piece]) -> int:
    """How many rows a block has."""
    count: int = _HEADER.unpack(block[0])[0]
    return count


def block_number(block: Sequence[Piece]) -> int:
    """Which block of its partition it is."""
    number: int = _HEADER.unpack(block[0])[1]
    return number


def decode(buffers: Sequence[bytes], schema: pa.Schema | None) -> Block:
    """The rows of a block, whose schema was sent before; None for pickled ones."""
    if schema is None:
        return _Items(pickle.loads(buffers[1]))
    return _Batch(pa.ipc.read_record_batch(pa.py_buffer(buffers[1]), schema))


def block_of(batch: pa.RecordBatch) -> Block:
    """A record batch as a program reads it."""
    return _Batch(batch)


class _Batch:
    def __init__(self, batch: pa.RecordBatch) -> None:
        self.size: int = batch.num_rows
        self._batch = batch
        self._arrays: Arrays = {}
        self._rows: list[Any] | None = None

    def rows(self, start: int, stop: int) -> list[Any]:
        if self._rows is None:
            kind = _row_type(tuple(self._batch.schema.names))
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


class _Items:
    def __init__(self, items: list[Any]) -> None:
        self.size = len(items)
        self._items = items

    def rows(self, start: int, stop: int) -> list[Any]:
        return self._items[start:stop]

    def arrays(self, names: Mapping[str, str], start: int, stop: int) -> Arrays:
        """Items are sequences here, with a value for each column in the order of the mapping."""
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
    made = np.empty(len(values), dtype=object)
    for number, value in enumerate(values):  # one by one: numpy would make a matrix of lists
        made[number] = value
    return made


def _own_dtype(kind: pa.DataType) -> str | None:
    """The dtype that keeps numbers as they are: float64 stays float64 in a program of the user's own."""
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return np.dtype(kind.to_pandas_dtype()).name if pa.types.is_floating(kind) else None


_row_types: dict[tuple[str, ...], Any] = {}


def _row_type(names: tuple[str, ...]) -> Any:
    """A named tuple; names that Python does not allow are numbered."""
    if names not in _row_types:
        _row_types[names] = namedtuple("Row", names, rename=True)
    return _row_types[names]
