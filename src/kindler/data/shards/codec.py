"""A shard's object as Arrow where it has rows and columns, as a pickle otherwise; and back.

    object                                              kind      kept as
    pandas DataFrame                                    frame     an Arrow table, its index included
    pandas Series                                       series    the same, with one column
    dict, list, tuple (nested) of arrays of one length  arrays    an Arrow table: a row of an array is one
                                                                  binary cell, so any dtype and shape fits
    anything else                                       object    a pickle (protocol 5, cloudpickle's)

Cells of a frame that Arrow has no type for are pickled one by one.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa

from kindler.data.arrow import stream, write_rows
from kindler.data.columns import Array
from kindler.data.shards import pytree
from kindler.errors import DataError

META = b"kindler"
_CHUNK_BYTES = 16 << 20
_SERIES = "series"
_PLAIN_KINDS = "biufcMmSU"
_STRUCTURED = (pa.types.is_struct, pa.types.is_map, pa.types.is_union)
_UNFIT = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, ValueError, TypeError)


@dataclass(frozen=True, slots=True)
class Info:
    """An object without rows counts as one; `items` is the length of a tuple or list."""

    kind: str
    rows: int
    rowwise: bool = True
    items: int | None = None
    name: str = ""
    schema: pa.Schema | None = None


@dataclass(frozen=True, slots=True)
class Packed:
    """`memory` is a private mapping that holds the table's buffers: arrays are writable views of it."""

    info: Info
    table: pa.Table = None
    data: bytes | None = None
    memory: Any = field(default=None, compare=False)

    @property
    def is_table(self) -> bool:
        return self.table is not None


def pack(thing: Any) -> Packed:
    kind = "frame" if pytree.is_frame(thing) else _SERIES if pytree.is_series(thing) else "arrays"
    if kind == _SERIES:
        table = _table_of(thing.to_frame())
        table = table if table is None else _with_meta(table, unnamed=thing.name is None)
    else:
        table = _table_of(thing) if kind == "frame" else _table_of_arrays(thing)
    return _pickled(thing) if table is None else from_table(table, kind)


def unpack(packed: Packed) -> Any:
    """Returned arrays are writable, without effect on the shard."""
    kind = packed.info.kind
    if kind == "frame":
        return table_to_pandas(packed.table)
    if kind == _SERIES:
        series = table_to_pandas(packed.table).iloc[:, 0]
        return series.rename(None) if meta(packed.table.schema).get("unnamed") else series
    if kind == "arrays":
        return _nest(meta(packed.table.schema)["nest"], packed)
    return pickle.loads(packed.data or b"")


def from_table(table: pa.Table, kind: str = "frame") -> Packed:
    items, name = None, "DataFrame" if kind == "frame" else "Series"
    if kind == "arrays":
        name, *inside = meta(table.schema)["nest"]
        items = len(inside[0]) if name in ("list", "tuple") else None
        name = "ndarray" if name == "array" else name
    return Packed(Info(kind, table.num_rows, items=items, name=name, schema=table.schema), table)


def cut(packed: Packed, start: int, stop: int) -> Packed:
    if packed.is_table:
        return _again(packed, packed.table.slice(start, stop - start))
    return pack(pytree.cut(unpack(packed), start, stop))


def taken(packed: Packed, positions: Array) -> Packed:
    if packed.is_table:
        return _again(packed, packed.table.take(pa.array(positions)))
    thing = unpack(packed)
    picked = [pytree.cut(thing, int(i), int(i) + 1) for i in positions]
    return pack(pytree.joined(picked) if picked else pytree.cut(thing, 0, 0))


def joined(parts: Sequence[Packed]) -> Packed:
    if len(parts) == 1:
        return parts[0]
    first, structures = parts[0], {_structure(part) for part in parts}
    if len(structures) == 1 and None not in structures:
        return _again(first, pa.concat_tables([part.table for part in parts]))
    things = [unpack(part) for part in parts if part.info.rows] or [unpack(first)]
    return pack(pytree.joined(things) if len(things) > 1 else things[0])


def _structure(packed: Packed) -> tuple[Any, ...] | None:
    """Types, and what `pack` and pandas noted; None if it is not a table."""
    if not packed.is_table:
        return None
    schema, metadata = packed.table.schema.remove_metadata(), packed.table.schema.metadata or {}
    return packed.info.kind, schema, metadata.get(META), metadata.get(b"pandas")


def _again(packed: Packed, table: pa.Table) -> Packed:
    made = from_table(table, packed.info.kind)
    return Packed(made.info, table, memory=packed.memory)


def leaves(schema: pa.Schema) -> list[tuple[tuple[Any, ...], str, str, tuple[int, ...]]]:
    """(path in the nest, column, dtype, row shape) of each array of a shard of kind `arrays`."""

    def walk(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str, str, tuple[int, ...]]]:
        if node[0] == "array":
            yield path, node[1], node[2], tuple(node[3])
        else:
            for key, inner in node[1] if node[0] == "dict" else enumerate(node[1]):
                yield from walk(inner, (*path, key))

    return list(walk(meta(schema)["nest"], ()))


def to_chunks(packed: Packed) -> Iterator[bytes]:
    """Pieces for any carrier of binary cells; those of a table can be read on their own."""
    if not packed.is_table:
        view = memoryview(packed.data or b"")
        for start in range(0, max(len(view), 1), _CHUNK_BYTES):
            yield bytes(view[start : start + _CHUNK_BYTES])
        return
    table = packed.table
    step = max(1, table.num_rows * _CHUNK_BYTES // max(table.nbytes, 1))
    for start in range(0, max(table.num_rows, 1), step):
        yield stream(table.slice(start, step))


def from_chunks(info: Info, chunks: Iterable[Any]) -> Packed:
    if info.schema is None:
        return Packed(info, data=b"".join(bytes(chunk) for chunk in chunks))
    tables = [pa.ipc.open_stream(pa.py_buffer(chunk)).read_all() for chunk in chunks]
    table = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
    return Packed(replace(info, schema=table.schema), table)


def write(packed: Packed, path: str | os.PathLike[str]) -> None:
    if not packed.is_table:
        with open(path, "wb") as file:
            file.write(packed.data or b"")
        return
    table = packed.table
    if packed.info.kind == "arrays":
        table = table.combine_chunks()  # an array in one piece is a view of the file
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        write_rows(writer, table)


def read(info: Info, path: str | os.PathLike[str]) -> Packed:
    """Tables are memory-mapped, not read."""
    if info.schema is None:
        with open(path, "rb") as file:
            return Packed(info, data=file.read())
    with open(path, "rb") as file:
        # A private mapping: what is written to its arrays stays in this process.
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    table = pa.ipc.open_file(pa.py_buffer(memory)).read_all()
    return Packed(replace(info, schema=table.schema), table, memory=memory)


def _pickled(thing: Any) -> Packed:
    count = pytree.rows(thing)
    info = Info(
        "object",
        1 if count is None else count,
        rowwise=count is not None,
        items=len(thing) if type(thing) in (list, tuple) else None,
        name=type(thing).__name__,
    )
    return Packed(info, data=cloudpickle.dumps(thing, protocol=5))


def meta(schema: pa.Schema) -> dict[str, Any]:
    """What `pack` noted about a table."""
    said: dict[str, Any] = json.loads((schema.metadata or {}).get(META, b"{}"))
    return said


def _with_meta(table: pa.Table, **more: Any) -> pa.Table:
    metadata = dict(table.schema.metadata or {})
    metadata[META] = json.dumps({**meta(table.schema), **more}).encode()
    return table.replace_schema_metadata(metadata)


def _table_of(frame: Any) -> pa.Table | None:
    """Convert a frame, noting what Arrow would not restore exactly; None if it cannot be converted."""
    import pandas as pd

    if frame.columns.inferred_type.startswith("mixed"):
        return None  # Arrow's names are strings, and which of them were none would be forgotten
    odd = [i for i, dtype in enumerate(frame.dtypes) if str(dtype) == "object"]
    pickled: list[int] = []
    try:
        table = pa.Table.from_pandas(frame, preserve_index=True)
    except _UNFIT:
        pickled = [i for i in odd if not _fits(frame.iloc[:, i])]
        try:
            table = pa.Table.from_pandas(_with_pickled(frame, pickled), preserve_index=True)
        except _UNFIT:
            return None
    doubtful = [
        i for i in odd if i not in pickled and any(test(table.schema.types[i]) for test in _STRUCTURED)
    ]
    if doubtful:
        pickled = sorted({*pickled, *doubtful})
        table = pa.Table.from_pandas(_with_pickled(frame, pickled), preserve_index=True)
    objects = [i for i in odd if i not in pickled and _changes(table.schema.types[i], frame.iloc[:, i])]
    index = frame.index
    counted = isinstance(index, pd.RangeIndex) and index.step == 1 and index.name is None
    return _with_meta(table, pickled=pickled, objects=objects, counted=counted)


def _fits(column: Any) -> bool:
    try:
        pa.array(column, from_pandas=True)
    except _UNFIT:
        return False
    return True


def _with_pickled(frame: Any, positions: list[int]) -> Any:
    import pandas as pd

    changed = frame.copy(deep=False)
    for i in positions:
        cells = [cloudpickle.dumps(cell, protocol=5) for cell in frame.iloc[:, i]]
        changed.isetitem(i, pd.Series(cells, index=frame.index, dtype=object))
    return changed


def _changes(kind: pa.DataType, column: Any) -> bool:
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind):
        return not all(cell is None or isinstance(cell, np.ndarray) for cell in column)
    same = (
        types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_null,
        types.is_date, types.is_time, types.is_decimal,
    )  # fmt: skip
    return not any(test(kind) for test in same)


def table_to_pandas(table: pa.Table) -> Any:
    """Restores what `pack` noted; integers with nulls stay integers."""
    import pandas as pd

    noted = meta(table.schema)
    own = "pickled" in noted
    try:
        frame = table.to_pandas(coerce_temporal_nanoseconds=not own)
    except pa.ArrowInvalid:  # a year that nanoseconds do not reach
        frame = table.to_pandas()
    if not own:
        for position, kind in enumerate(table.schema.types):
            column = table.column(position)
            if pa.types.is_integer(kind) and column.null_count:
                nullable = pd.array([], str(kind).replace("uint", "UInt").replace("int", "Int")).dtype
                frame.isetitem(position, column.to_pandas(types_mapper={kind: nullable}.get))
        return frame
    for position in (*noted["pickled"], *noted["objects"]):
        cells = table.column(position).to_pylist()
        if position in noted["pickled"]:
            cells = [pickle.loads(cell) for cell in cells]
        frame.isetitem(position, pd.Series(cells, index=frame.index, dtype=object))
    index = frame.index.to_numpy()
    if noted["counted"] and index.dtype == np.int64 and (np.diff(index) == 1).all():
        start = int(index[0]) if len(frame) else 0
        frame.index = pd.RangeIndex(start, start + len(frame))
    return frame


def _table_of_arrays(thing: Any) -> pa.Table | None:
    columns: dict[str, pa.Array] = {}
    try:
        nest = _describe(thing, columns)
    except TypeError:
        return None
    if len({len(column) for column in columns.values()}) != 1:
        return None
    return _with_meta(pa.table(columns), nest=nest)


def _describe(thing: Any, columns: dict[str, pa.Array]) -> list[Any]:
    """Adds the columns of nested arrays; raises TypeError for anything else."""
    if type(thing) is dict and thing and all(type(key) is str for key in thing):
        return ["dict", [[key, _describe(part, columns)] for key, part in thing.items()]]
    if type(thing) in (list, tuple) and thing:
        return [type(thing).__name__, [_describe(part, columns) for part in thing]]
    if type(thing) not in (np.ndarray, np.memmap) or thing.dtype.kind not in _PLAIN_KINDS or not thing.ndim:
        raise TypeError(type(thing))
    width = thing.dtype.itemsize * int(np.prod(thing.shape[1:], dtype=np.int64))
    if not 0 < width < 2**31:
        raise TypeError(thing.shape)
    flat = np.ascontiguousarray(thing).reshape(-1).view(np.uint8)
    name = f"c{len(columns)}"
    columns[name] = pa.Array.from_buffers(pa.binary(width), len(thing), [None, pa.py_buffer(flat)])
    return ["array", name, thing.dtype.str, list(thing.shape[1:])]


def _nest(node: Any, packed: Packed) -> Any:
    if node[0] == "dict":
        return {key: _nest(inner, packed) for key, inner in node[1]}
    if node[0] == "array":
        return column_to_array(packed, node[1], node[2], tuple(node[3]), writable=True)
    inside = [_nest(inner, packed) for inner in node[1]]
    return inside if node[0] == "list" else tuple(inside)


def column_to_array(
    packed: Packed, column: str, dtype: str, shape: tuple[int, ...], *, writable: bool = False
) -> Array:
    """A view if the column is contiguous; copied where `writable` requires it."""
    parts = [
        _view(chunk, np.dtype(dtype), shape, packed.memory, writable)
        for chunk in packed.table.column(column).chunks
        if len(chunk)
    ]
    if not parts:
        return np.empty((0, *shape), dtype)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _view(
    chunk: pa.Array, dtype: np.dtype[Any], shape: tuple[int, ...], memory: Any, writable: bool
) -> Array:
    if chunk.null_count:
        raise DataError("rows of an array are missing: shards of different structure were joined.")
    width = chunk.type.byte_width
    buffer = chunk.buffers()[1]
    start, size = chunk.offset * width, len(chunk) * width
    if memory is not None:
        base = np.frombuffer(memory, np.uint8)
        offset = buffer.address + start - base.ctypes.data
        if offset >= 0 and offset + size <= len(base):
            return base[offset : offset + size].view(dtype).reshape(len(chunk), *shape)
    view = np.frombuffer(buffer, np.uint8, size, start).view(dtype).reshape(len(chunk), *shape)
    return view.copy() if writable else view
