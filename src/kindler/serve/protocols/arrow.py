"""Arrow streams and Parquet files in a body, which must not become more than the server can hold.

A few bytes of either can stand for more rows than there is memory. What claims more values than its bytes
could hold, or more bytes than it can be worth, is refused before it is read.
"""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kindler.errors import first_line
from kindler.serve.problems import Problem

__all__ = ["is_text", "read_arrow", "read_parquet"]

_VALUES_PER_BYTE = 8  # booleans
_GROWTH = 16  # how much larger than the body a Parquet file may say that it is
_SPARE_BYTES = 64 << 20
_TEXTS = frozenset(
    (
        "string",
        "large_string",
        "string_view",
        "binary",
        "large_binary",
        "binary_view",
        "fixed_size_binary",
    )
)


def read_arrow(body: bytes) -> pa.Table:
    """A stream of Arrow record batches, without compression.

    Raises:
        Problem: 400: it is none, or claims more than it holds.
    """
    try:
        _check_not_compressed(body)
        with pa.ipc.open_stream(body) as stream:
            table = stream.read_all()
        claimed = max((_longest(chunk) for column in table.columns for chunk in column.chunks), default=0)
        if claimed > _VALUES_PER_BYTE * len(body):
            raise ValueError(f"it claims {claimed} values in {len(body)} bytes")
        table.validate(full=True)
        return table
    except (pa.ArrowException, OSError, ValueError, struct.error) as exc:
        raise Problem(400, f"the body is no Arrow stream: {first_line(exc)}.") from exc


def read_parquet(body: bytes, *, share_texts: bool = False) -> pa.Table:
    """A Parquet file.

    Args:
        body: The file.
        share_texts: Texts that are there many times are kept once, as a dictionary.

    Raises:
        Problem: 400: it is none, or claims more than it can be worth.
    """
    try:
        with pq.ParquetFile(pa.BufferReader(body)) as file:
            told, schema = file.metadata, file.schema_arrow
        groups = [told.row_group(i) for i in range(told.num_row_groups)]
        rows = max(told.num_rows, sum(group.num_rows for group in groups))
        claimed = max(sum(group.total_byte_size for group in groups), 8 * rows * told.num_columns)
        if claimed > _GROWTH * len(body) + _SPARE_BYTES:
            raise ValueError(f"it claims {claimed} bytes in {len(body)}")
        texts = [field.name for field in schema if is_text(field.type)] if share_texts else None
        with pq.ParquetFile(pa.BufferReader(body), read_dictionary=texts) as file:
            return file.read()
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise Problem(400, f"the body is no Parquet file: {first_line(exc)}.") from exc


def _longest(array: Any) -> int:
    """The length of an array, or of the longest within it."""
    kids = [array.field(i) for i in range(array.type.num_fields)] if _has_fields(array) else []
    kids += [getattr(array, name) for name in ("values", "storage", "dictionary") if hasattr(array, name)]
    return max([len(array), *map(_longest, kids)])


def _has_fields(array: Any) -> bool:
    return isinstance(array, pa.StructArray | pa.UnionArray)


def _check_not_compressed(body: bytes) -> None:
    """What a compressed buffer becomes is not known before it has become that."""
    reader = pa.ipc.MessageReader.open_stream(pa.BufferReader(body))
    for message in reader:
        told = message.metadata.to_pybytes()
        header = _follow(told, struct.unpack_from("<I", told)[0], 2)
        if message.type == "dictionary batch":
            header = _follow(told, header, 1)
        elif message.type != "record batch":
            continue
        if _field(told, header, 3):
            raise ValueError("its buffers are compressed; they must not be")


def _field(told: bytes, table: int, number: int) -> int:
    """Where a field of a flatbuffer's table is; 0 if it is not there."""
    listed = table - int(struct.unpack_from("<i", told, table)[0])
    at = 4 + 2 * number
    if at >= struct.unpack_from("<H", told, listed)[0]:
        return 0
    offset = int(struct.unpack_from("<H", told, listed + at)[0])
    return table + offset if offset else 0


def _follow(told: bytes, table: int, number: int) -> int:
    """Where the table is that a field of a table points to."""
    at = _field(told, table, number)
    if not at:
        raise ValueError("a message has no header")
    return at + int(struct.unpack_from("<I", told, at)[0])


def is_text(kind: pa.DataType) -> bool:
    """Whether values are texts or bytes."""
    return str(kind).partition("[")[0] in _TEXTS
