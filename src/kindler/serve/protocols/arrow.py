"""Arrow streams and Parquet files in a body, which must not become more than the server can hold.

A few bytes of either can stand for more rows than there is memory. A stream that claims more than its bytes
hold is refused before it is read. What a Parquet file becomes is known only when it is read, so that happens
in a process whose memory is bounded (`readers.py`); what it claims is looked at first.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from kindler.data import received
from kindler.errors import first_line
from kindler.models.arrow_columns import is_text
from kindler.serve.http_errors import Problem

_GROWTH = 16  # how much larger than the body a Parquet file may say that it is
_SPARE_BYTES = 64 << 20


def read_arrow(body: bytes) -> pa.Table:
    """A stream of Arrow record batches, without compression.

    Raises:
        Problem: 400: it is none, claims more than it holds, or has types that may stand for more than that.
    """
    try:
        return received.arrow_table(body)
    except ValueError as exc:
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
