"""Tables in a body: JSON of several forms, CSV, Arrow and Parquet, as numpy columns; and answers as Arrow.

A few bytes of Arrow or Parquet can stand for more rows than there is memory. A stream that claims more than
its bytes hold is refused before it is read. What a Parquet file becomes is known only when it is read: that
happens in a process whose memory is bounded (`bodies.py`), and what it claims is looked at first.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from kindler.data import received
from kindler.data.arrow import stream
from kindler.errors import DataError, first_line
from kindler.models import arrow_columns
from kindler.models.signature import Array
from kindler.serve.http_errors import Problem
from kindler.serve.protocols import Answer
from kindler.serve.protocols.values import as_tensors, field_of, load_object

ARROW = "application/vnd.apache.arrow.stream"
PARQUET = "application/vnd.apache.parquet"
CSV = "text/csv"
_GROWTH = 16  # how much larger than the body a Parquet file may say that it is
_SPARE_BYTES = 64 << 20


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except MemoryError:  # Arrow's own among them: the body may be what it should, and is too much
        raise
    except (pa.ArrowException, OSError, TypeError, ValueError) as exc:
        raise Problem(400, f"the body is not {what}: {first_line(exc)}.") from exc


def columns_in(data: Any) -> dict[str, Array]:
    """The columns of a table in JSON: a list of objects, an object of lists, or one of objects by row."""
    if isinstance(data, list):
        return as_tensors(by_name(data))
    if not isinstance(data, dict):
        raise Problem(400, "'data' must be an object of columns, or a list of rows.")
    _check_columns(len(data))
    columns = {
        name: list(values.values()) if isinstance(values, dict) else values for name, values in data.items()
    }
    for name, values in columns.items():
        if not isinstance(values, list):
            raise Problem(400, f"the column {name!r} must be a list.")
    return as_tensors(columns)


def by_name(records: list[Any]) -> dict[str, list[Any]]:
    if not records or not isinstance(records[0], dict):
        raise Problem(400, "the data must be a non-empty list of objects.")
    names = list(records[0])
    _check_columns(len(names))
    for i, record in enumerate(records):
        if not isinstance(record, dict) or record.keys() != records[0].keys():
            raise Problem(400, f"row {i} does not have the columns of the first row: {names}.")
    return {name: [record[name] for record in records] for name in names}


def read_columns(body: bytes, kind: str) -> dict[str, Array]:
    """The columns of a body of CSV, Parquet or Arrow."""
    if kind == ARROW:
        return table_columns(read_arrow(body))
    if kind == PARQUET:
        return table_columns(read_parquet(body, share_texts=True))
    _check_columns(body.count(b",", 0, body.find(b"\n")) + 1)
    with _reading("CSV"):
        table = pyarrow.csv.read_csv(io.BytesIO(body))
    return table_columns(table)


def read_table(body: bytes, content_type: str) -> tuple[pa.Table, str | None]:
    """A table to be stored, and what the body says is to become of one that is there."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == ARROW:
        return read_arrow(body), None
    if kind == PARQUET:
        return read_parquet(body), None
    if kind not in ("", "application/json"):
        raise Problem(
            415, f"unsupported content type {kind[:80]!r}; expected application/json, {ARROW} or {PARQUET}."
        )
    fields = load_object(body)
    if "data" not in fields:
        raise Problem(400, "the request has no 'data'.")
    mode, dtypes = field_of(fields, "mode", ""), field_of(fields, "dtypes", {})
    arrays = columns_in(fields["data"])
    if unknown := [name for name in dtypes if name not in arrays]:
        raise Problem(400, f"'dtypes' names {unknown[0]!r}, which is not a column.")
    with _reading("a table"):
        columns = {name: pa.array(array.tolist()) for name, array in arrays.items()}
        for name, dtype in dtypes.items():
            columns[name] = columns[name].cast(pa.from_numpy_dtype(np.dtype(str(dtype))))
        table = pa.table(columns)
    # omega|ml's word: true adds rows, false puts these in the place of those that are there.
    append = fields.get("append")
    return table, mode or ("append" if append is True else "replace" if append is False else None)


def _check_columns(count: int) -> None:
    if count > received.MOST_COLUMNS:
        raise Problem(413, f"the table has {count} columns; at most {received.MOST_COLUMNS} are allowed.")


def to_arrow(answer: Answer) -> bytes:
    """The outputs as columns of an Arrow stream; what has several dimensions as tensors of fixed shape."""
    answer.check_rows()
    return stream(pa.table({name: arrow_columns.as_column(array) for name, array in answer.outputs.items()}))


def table_columns(table: pa.Table) -> dict[str, Array]:
    _check_columns(table.num_columns)
    try:
        return arrow_columns.columns_of(table)
    except DataError as exc:
        raise Problem(400, str(exc)) from exc


def read_arrow(body: bytes) -> pa.Table:
    """A stream of Arrow record batches, without compression."""
    with _reading("an Arrow stream"):
        return received.arrow_table(body)


def read_parquet(body: bytes, *, share_texts: bool = False) -> pa.Table:
    with _reading("a Parquet file"):
        with pq.ParquetFile(pa.BufferReader(body)) as file:
            metadata, schema = file.metadata, file.schema_arrow
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        rows = max(metadata.num_rows, sum(group.num_rows for group in groups))
        claimed = max(sum(group.total_byte_size for group in groups), 8 * rows * metadata.num_columns)
        limit = _GROWTH * len(body) + _SPARE_BYTES
        if claimed > limit:
            raise Problem(
                413,
                f"the Parquet file of {len(body)} bytes holds {rows} rows, which take {claimed} bytes or"
                f" more; at most {limit} bytes are allowed for a file of this size.",
            )
        texts = [field.name for field in schema if arrow_columns.is_text(field.type)] if share_texts else None
        try:
            return _read(body, texts)
        except (pa.ArrowNotImplementedError, OSError):  # some encodings of texts cannot be shared
            return _read(body, None)


def _read(body: bytes, texts: list[str] | None) -> pa.Table:
    with pq.ParquetFile(pa.BufferReader(body), read_dictionary=texts) as file:
        return file.read(use_threads=False)  # whose stacks would count as memory of the file
