"""Tables in a body: JSON of several forms, CSV, Arrow and Parquet, as numpy columns; and answers as Arrow.

A few bytes of Arrow or Parquet can stand for more rows than there is memory. A stream that claims more than
its bytes hold is refused before it is read. What a Parquet file becomes is known only when it is read: that
happens in a process whose memory is bounded (`body_readers.py`), and what it claims is looked at first.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
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
from kindler.serve.protocols.values import as_object, as_tensor, loads
from kindler.serve.requests import Answer

ARROW = "application/vnd.apache.arrow.stream"
PARQUET = "application/vnd.apache.parquet"
_GROWTH = 16  # how much larger than the body a Parquet file may say that it is
_SPARE_BYTES = 64 << 20


def from_records(records: Sequence[Any]) -> dict[str, Array]:
    """A list of objects with the same names."""
    if not records or not isinstance(records[0], dict):
        raise Problem(400, "the data must be a non-empty list of objects.")
    names = list(records[0])
    _check_columns(len(names))
    for i, record in enumerate(records):
        if not isinstance(record, dict) or record.keys() != records[0].keys():
            raise Problem(400, f"row {i} does not have the columns of the first row: {names}.")
    return {name: as_tensor([record[name] for record in records], f"the column {name!r}") for name in names}


def columns_of(data: Mapping[str, Any]) -> dict[str, Array]:
    """An object of lists, or of objects that are lists by row number."""
    _check_columns(len(data))
    arrays = {}
    for name, values in data.items():
        listed = list(values.values()) if isinstance(values, dict) else values
        if not isinstance(listed, list):
            raise Problem(400, f"the column {name!r} must be a list.")
        arrays[str(name)] = as_tensor(listed, f"the column {name!r}")
    return arrays


def from_csv(body: bytes) -> dict[str, Array]:
    """A table with a line of names."""
    _check_columns(body.count(b",", 0, body.find(b"\n")) + 1)
    try:
        return table_columns(pyarrow.csv.read_csv(io.BytesIO(body)))
    except MemoryError:
        raise
    except (pa.ArrowException, ValueError) as exc:
        raise Problem(400, f"the body is not CSV: {first_line(exc)}.") from exc


def from_parquet(body: bytes) -> dict[str, Array]:
    """A Parquet file."""
    return table_columns(read_parquet(body, share_texts=True))


def from_arrow(body: bytes) -> dict[str, Array]:
    """A stream of Arrow record batches."""
    return table_columns(read_arrow(body))


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
    fields = as_object(loads(body))
    if "data" not in fields:
        raise Problem(400, "the request has no 'data'.")
    mode = fields.get("mode")
    if mode is not None and not isinstance(mode, str):
        raise Problem(400, "'mode' must be a string.")
    table = _from_json(fields["data"], fields.get("dtypes"))
    # omega|ml's word: true adds rows, false puts these in the place of those that are there.
    append = fields.get("append")
    return table, mode or ("append" if append is True else "replace" if append is False else None)


def _from_json(data: Any, dtypes: Any) -> pa.Table:
    if isinstance(data, dict):
        arrays = columns_of(data)
    elif isinstance(data, list):
        arrays = from_records(data)
    else:
        raise Problem(400, "'data' must be an object of columns, or a list of rows.")
    if dtypes is not None and not isinstance(dtypes, dict):
        raise Problem(400, "'dtypes' must be an object of columns.")
    try:
        columns = {name: pa.array(array.tolist()) for name, array in arrays.items()}
        for name, dtype in (dtypes or {}).items():
            if name not in columns:
                raise Problem(400, f"'dtypes' names {name!r}, which is not a column.")
            columns[name] = columns[name].cast(pa.from_numpy_dtype(np.dtype(str(dtype))))
        return pa.table(columns)
    except MemoryError:
        raise
    except (pa.ArrowException, TypeError, ValueError) as exc:
        raise Problem(400, f"the data is not a table: {exc}") from exc


def _check_columns(count: int) -> None:
    if count > received.MOST_COLUMNS:
        raise Problem(413, f"the table has {count} columns; at most {received.MOST_COLUMNS} are allowed.")


def to_arrow(answer: Answer) -> bytes:
    """The outputs as columns of an Arrow stream; what has several dimensions as tensors of fixed shape."""
    arrays, names = [], []
    for name, array in answer.outputs.items():
        if not array.ndim or len(array) != answer.rows:
            raise Problem(400, f"the output {name!r} does not have one row per row of the request.")
        names.append(name)
        arrays.append(_arrow(array))
    return stream(pa.Table.from_arrays(arrays, names=names))


def _arrow(array: Array) -> pa.Array:
    if array.ndim == 1:
        return pa.array(array.tolist() if array.dtype.kind == "O" else array)
    if array.dtype.kind in "Ob" or 0 in array.shape:
        return pa.array(array.tolist())
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(array))


def table_columns(table: pa.Table) -> dict[str, Array]:
    """The columns of an Arrow table."""
    _check_columns(table.num_columns)
    try:
        return arrow_columns.columns_of(table)
    except DataError as exc:
        raise Problem(400, str(exc)) from exc


def read_arrow(body: bytes) -> pa.Table:
    """A stream of Arrow record batches, without compression."""
    try:
        return received.arrow_table(body)
    except ValueError as exc:
        raise Problem(400, f"the body is not an Arrow stream: {first_line(exc)}.") from exc


def read_parquet(body: bytes, *, share_texts: bool = False) -> pa.Table:
    """A Parquet file."""
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
        texts = [field.name for field in schema if arrow_columns.is_text(field.type)] if share_texts else None
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
