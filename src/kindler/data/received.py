"""Validates data from untrusted processes before it is used. The bytes may claim shapes of a hundred
thousand dimensions, JSON that grows thirtyfold, or Arrow offsets outside their buffers. Everything here
returns data that is safe and about as large as its bytes, or raises ValueError."""

from __future__ import annotations

import math
import re
import struct
from typing import Any

import numpy as np
import pyarrow as pa

MOST_COLUMNS = 10_000
_MOST_DIMENSIONS = 64  # numpy has no more

MOST_VALUES = 4 << 20  # of JSON; each becomes up to a hundred bytes
_TEXT = re.compile(rb'"[^"\\]*(?:\\.?[^"\\]*)*(?:"|\Z)', re.DOTALL)  # never tries twice, whatever is sent
_NUMBERS = re.compile(r"[<>|=]?(b1|[iuf][1248]|f16|c(8|16|32)|[SU]\d{1,9}|[mM]8(\[\w{1,8}\])?)")

_VALUES_PER_BYTE = 8  # booleans
_MOST_MESSAGES = 10_000  # each takes some time, however small it is
_MOST_HEADER = 8 << 20  # of a message; a column takes about 200 bytes
_REPEATING = frozenset(("string_view", "binary_view", "list_view", "large_list_view", "run_end_encoded"))


def check_json(content: bytes, most: int = MOST_VALUES) -> bytes:
    if len(content) > most and _marks(content) > most and _marks(_TEXT.sub(b"", content)) > most:
        raise ValueError(f"{len(content)} bytes of JSON with more than {most} values")
    return content


def _marks(content: bytes) -> int:
    """Approximate number of JSON values; counts commas inside strings too."""
    return sum(map(content.count, (b",", b":", b"[", b"{")))


def shape(sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, list | tuple) or len(sizes) > _MOST_DIMENSIONS:
        raise ValueError("not the shape of an array, or one of too many dimensions")
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes):
        raise ValueError(f"not the shape of an array: {str(sizes)[:100]}")
    return tuple(sizes)


def array(content: bytes | memoryview, dtype: Any, sizes: Any) -> np.ndarray[Any, Any]:
    if type(dtype) is not str or not _NUMBERS.fullmatch(dtype):
        raise ValueError(f"an array of {str(dtype)[:40]!r}, which is not allowed")
    try:
        kind = np.dtype(dtype)
    except TypeError as exc:
        raise ValueError(f"an array of {dtype!r}: {exc}") from exc
    wanted = shape(sizes)
    if math.prod(wanted) * max(1, kind.itemsize) != len(content):
        raise ValueError(f"an array of {dtype} and shape {wanted} in {len(content)} bytes")
    if not len(content):
        return np.zeros(wanted, kind)
    found = np.frombuffer(content, kind).reshape(wanted)
    # Of a boolean that is neither 0 nor 1 nobody knows what compiled code makes. A copy: whoever sent the
    # bytes may still write there, and models write to their inputs.
    return np.asarray(found.view(np.uint8) != 0) if kind.kind == "b" else found.copy()


def arrow_table(content: Any) -> pa.Table:
    try:
        _check_messages(content)
        with pa.ipc.open_stream(content) as stream:
            if len(stream.schema) > MOST_COLUMNS:
                raise ValueError(f"it has {len(stream.schema)} columns; at most {MOST_COLUMNS} are allowed")
            for field in stream.schema:
                _check_type(field.type, field.name)
            table = stream.read_all()
        table.validate(full=True)
        return table
    except (pa.ArrowException, OSError, struct.error) as exc:
        raise ValueError(str(exc)) from exc


def _check_type(kind: pa.DataType, name: str) -> None:
    """Reject views, runs and unions: they can repeat the same bytes any number of times."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
        if kind.num_fields:
            raise ValueError(f"the column {name!r} is a dictionary of {kind}, which is not supported")
    if pa.types.is_fixed_size_binary(kind) and not kind.byte_width:
        raise ValueError(f"the column {name!r} has texts of no bytes")
    kind_name = str(kind).partition("[")[0].partition("<")[0]
    if kind_name in _REPEATING or kind_name.endswith("_union"):
        raise ValueError(f"the column {name!r} is of type {kind_name}, which is not supported; cast it")
    for i in range(kind.num_fields):
        _check_type(kind.field(i).type, name)


def _check_messages(body: bytes) -> None:
    """Reject messages that claim more than they hold: compression, shared bytes, endless columns."""
    values = 0
    for i, message in enumerate(pa.ipc.MessageReader.open_stream(pa.BufferReader(body))):
        if i >= _MOST_MESSAGES:
            raise ValueError(f"it has more than {_MOST_MESSAGES} messages")
        if message.metadata.size > _MOST_HEADER:
            raise ValueError(f"a message has a header of {message.metadata.size} bytes")
        metadata = message.metadata.to_pybytes()
        header = _follow(metadata, struct.unpack_from("<I", metadata)[0], 2)
        if message.type == "dictionary batch":
            header = _follow(metadata, header, 1)
        elif message.type != "record batch":
            continue
        if _field(metadata, header, 3):
            raise ValueError("its buffers are compressed, which is not supported")
        here = message.body.size if message.body is not None else 0
        lengths, sizes = _pairs(metadata, header, 1)[:, 0], _pairs(metadata, header, 2)[:, 1]
        if sizes.min(initial=0) < 0 or int(sizes.sum()) > here:
            raise ValueError(f"its buffers claim more than the {here} bytes of a message")
        if lengths.min(initial=0) < 0:
            raise ValueError("it claims a negative number of values")
        # All together, as values of some types take no bytes at all.
        values += sum(lengths.tolist())
        if values > _VALUES_PER_BYTE * len(body):
            raise ValueError(f"it claims {values} values in {len(body)} bytes")


def _pairs(header: bytes, table: int, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    if not _field(header, table, number):
        return np.zeros((0, 2), np.int64)
    at = _follow(header, table, number)
    count = int(struct.unpack_from("<I", header, at)[0])
    return np.frombuffer(header, "<i8", 2 * count, at + 4).reshape(count, 2)


def _field(header: bytes, table: int, number: int) -> int:
    listed = table - int(struct.unpack_from("<i", header, table)[0])
    at = 4 + 2 * number
    if at >= struct.unpack_from("<H", header, listed)[0]:
        return 0
    offset = int(struct.unpack_from("<H", header, listed + at)[0])
    return table + offset if offset else 0


def _follow(header: bytes, table: int, number: int) -> int:
    at = _field(header, table, number)
    if not at:
        raise ValueError("a message has no header")
    return at + int(struct.unpack_from("<I", header, at)[0])
