"""Arrow streams and Parquet files in a body, which must not become more than the server can hold.

A few bytes of either can stand for more rows than there is memory. A stream that claims more than its bytes
hold is refused before it is read. What a Parquet file becomes is known only when it is read, so that happens
in a process whose memory is bounded (`readers.py`); what it claims is looked at first.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kindler.errors import first_line
from kindler.models.arrow_columns import is_text
from kindler.serve.http_errors import Problem

__all__ = ["MOST_COLUMNS", "read_arrow", "read_parquet"]

MOST_COLUMNS = 10_000

_VALUES_PER_BYTE = 8  # booleans
_MOST_MESSAGES = 10_000  # each takes some time, however small it is
_MOST_HEADER = 8 << 20  # of a message; a column takes about 200 bytes
_GROWTH = 16  # how much larger than the body a Parquet file may say that it is
_SPARE_BYTES = 64 << 20
_REPEATING = frozenset(("string_view", "binary_view", "list_view", "large_list_view", "run_end_encoded"))


def read_arrow(body: bytes) -> pa.Table:
    """A stream of Arrow record batches, without compression.

    Raises:
        Problem: 400: it is none, claims more than it holds, or has types that may stand for more than that.
    """
    try:
        _check_messages(body)
        with pa.ipc.open_stream(body) as stream:
            if len(stream.schema) > MOST_COLUMNS:
                raise ValueError(f"it has {len(stream.schema)} columns; at most {MOST_COLUMNS} are allowed")
            for field in stream.schema:
                _check_type(field.type, field.name)
            table = stream.read_all()
        table.validate(full=True)
        return table
    except (pa.ArrowException, OSError, ValueError, struct.error) as exc:
        raise Problem(400, f"the body is not an Arrow stream: {first_line(exc)}.") from exc


def read_parquet(body: bytes, *, share_texts: bool = False) -> pa.Table:
    """A Parquet file.

    Args:
        body: The file.
        share_texts: Texts that are there many times are kept once, as a dictionary.

    Raises:
        Problem: 400: it is none; 413: it claims more than its bytes can be worth.
        MemoryError: It becomes more than there is room for.
    """
    try:
        with pq.ParquetFile(pa.BufferReader(body)) as file:
            metadata, schema = file.metadata, file.schema_arrow
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        rows = max(metadata.num_rows, sum(group.num_rows for group in groups))
        claimed = max(sum(group.total_byte_size for group in groups), 8 * rows * metadata.num_columns)
        limit = _GROWTH * len(body) + _SPARE_BYTES
        if claimed > limit:
            raise Problem(
                413,
                f"the Parquet file of {len(body)} bytes holds {rows} rows, which take {claimed} bytes"
                f" or more; at most {limit} bytes are read from one of its size.",
            )
        texts = [field.name for field in schema if is_text(field.type)] if share_texts else None
        try:
            return _read(body, texts)
        except (pa.ArrowNotImplementedError, OSError):  # some encodings of texts cannot be shared
            return _read(body, None)
    except MemoryError:  # Arrow's own among them: it is a Parquet file, and too much
        raise
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise Problem(400, f"the body is not a Parquet file: {first_line(exc)}.") from exc


def _read(body: bytes, texts: list[str] | None) -> pa.Table:
    with pq.ParquetFile(pa.BufferReader(body), read_dictionary=texts) as file:
        return file.read(use_threads=False)  # whose stacks would count as memory of the file


def _check_type(kind: pa.DataType, name: str) -> None:
    """Views, runs and unions may show the same bytes any number of times, which shows only in reading."""
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
    """No message may claim more than it holds: no compression, no bytes used twice, no endless columns."""
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
            raise ValueError("it claims fewer values than none")
        # All together, as values of some types take no bytes at all.
        values += sum(lengths.tolist())
        if values > _VALUES_PER_BYTE * len(body):
            raise ValueError(f"it claims {values} values in {len(body)} bytes")


def _pairs(header: bytes, table: int, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A vector of structs of two long integers in a flatbuffer; none if it is not there."""
    if not _field(header, table, number):
        return np.zeros((0, 2), np.int64)
    at = _follow(header, table, number)
    count = int(struct.unpack_from("<I", header, at)[0])
    return np.frombuffer(header, "<i8", 2 * count, at + 4).reshape(count, 2)


def _field(header: bytes, table: int, number: int) -> int:
    """Where a field of a flatbuffer's table is; 0 if it is not there."""
    listed = table - int(struct.unpack_from("<i", header, table)[0])
    at = 4 + 2 * number
    if at >= struct.unpack_from("<H", header, listed)[0]:
        return 0
    offset = int(struct.unpack_from("<H", header, listed + at)[0])
    return table + offset if offset else 0


def _follow(header: bytes, table: int, number: int) -> int:
    """Where the table is that a field of a table points to."""
    at = _field(header, table, number)
    if not at:
        raise ValueError("a message has no header")
    return at + int(struct.unpack_from("<I", header, at)[0])
