"""Files of data by what their names end in: tables, arrays, values, and the rows of a prediction."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from kindler.errors import ConfigError, DataError, first_line
from kindler.models.arrow_columns import columns_of

Array = np.ndarray[Any, np.dtype[Any]]

FORMATS = ("csv", "json", "jsonl", "parquet", "npy", "npz")
_EXTENSIONS = f"one of {', '.join('.' + name for name in FORMATS)}"


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows to predict: arrays by name ("" if there is none), and the table of which they are columns."""

    arrays: Mapping[str, Array]
    table: pa.Table | None = None


def to_store(path: Path) -> Any:
    """The object to store for a file: its path if the store reads that kind itself, else its content."""
    if not path.exists():
        raise ConfigError(f"{str(path)!r} does not exist.")
    kind = path.suffix.lower().removeprefix(".")
    if kind in ("csv", "jsonl"):
        return _table(path.read_bytes(), kind, str(path))
    return _arrays(path.read_bytes(), str(path)) if kind == "npz" else path


def read_rows(path: str, kind: str | None) -> Rows:
    """The rows of a file, or of standard input if the path is "-".

    Args:
        path: The file.
        kind: One of `FORMATS`; None to detect it from the name, or from the first characters.

    Raises:
        DataError: The content cannot be read as rows.
    """
    content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    shown = "the input" if path == "-" else path
    chosen = kind or _kind(Path(path), content)
    if chosen in ("csv", "jsonl", "parquet"):
        table = _table(content, chosen, shown)
        return Rows(columns_of(table), table)
    if chosen == "npz":
        return Rows(_arrays(content, shown))
    if chosen == "npy":
        return Rows({"": _array(content, shown)})
    return _from_json(content, shown)


def as_columns(arrays: Mapping[str, Array]) -> pa.Table:
    """A table of arrays: rows of several numbers as tensors of fixed shape."""
    return pa.table({name: _column(array, name) for name, array in arrays.items()})


def write(value: Any, path: Path | None) -> None:
    """Write a value to a file, in the format of its extension; without a path, print it.

    Raises:
        ConfigError: The format cannot hold the value.
    """
    printed = "csv" if isinstance(value, pa.Table) else "json"
    kind = path.suffix.lower().removeprefix(".") if path is not None else printed
    if kind not in FORMATS:
        raise ConfigError(f"{path} has an unknown extension; expected {_EXTENSIONS}.")
    content = _content(value, kind)
    if path is None:
        sys.stdout.write(content.decode())
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _kind(path: Path, content: bytes) -> str:
    suffix = path.suffix.lower().removeprefix(".")
    if suffix in FORMATS:
        return suffix
    if str(path) != "-":
        raise ConfigError(f"{path} has an unknown extension; expected {_EXTENSIONS}.\nHint: pass --format.")
    return "json" if content.lstrip()[:1] in (b"[", b"{") else "csv"


def _table(content: bytes, kind: str, shown: str) -> pa.Table:
    try:
        if kind == "csv":
            return pa.csv.read_csv(io.BytesIO(content))
        if kind == "jsonl":
            return pa.json.read_json(io.BytesIO(content))
        return pq.read_table(io.BytesIO(content))
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise DataError(f"{shown} is not a {kind} file: {_first(exc)}.") from exc


def _array(content: bytes, shown: str) -> Array:
    try:
        array: Array = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError) as exc:
        raise DataError(
            f"{shown} is not an array that can be read without unpickling: {_first(exc)}."
        ) from exc
    return array


def _arrays(content: bytes, shown: str) -> dict[str, Array]:
    loaded: Any = _array(content, shown)
    if isinstance(loaded, np.ndarray):
        raise DataError(f"{shown} holds a single array; expected a .npz file of named arrays.")
    return {name: loaded[name] for name in loaded.files}


def _from_json(content: bytes, shown: str) -> Rows:
    try:
        value = json.loads(content)
    except ValueError as exc:
        raise DataError(f"{shown} is not JSON: {exc}.") from exc
    try:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            table = pa.Table.from_pylist(value)
            return Rows(columns_of(table), table)
        if isinstance(value, dict):
            table = pa.table({name: pa.array(items) for name, items in value.items()})
            return Rows(columns_of(table), table)
        array = np.array(value)
    except (pa.ArrowException, ValueError, TypeError) as exc:
        raise DataError(f"{shown} does not hold rows: {_first(exc)}.") from exc
    if not isinstance(value, list) or not value or array.dtype.kind not in "biufU":
        raise DataError(f"{shown} must be a list of rows, a list of objects, or an object of lists.")
    return Rows({"": array})


def _column(array: Array, name: str) -> Any:
    if not array.ndim:
        raise DataError(f"{name or 'the array'} is a single value; expected an array of rows.")
    if array.ndim == 1 or array.dtype.kind in "ObUS" or 0 in array.shape:
        return pa.array(array.tolist() if array.ndim > 1 or array.dtype.kind in "OUS" else array)
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(array))


def _content(value: Any, kind: str) -> bytes:
    if kind == "json":
        return f"{json.dumps(_plain(value))}\n".encode()
    sink = io.BytesIO()
    if kind == "npy":
        if not isinstance(value, np.ndarray):
            raise ConfigError(f"a .npy file holds one array; received a {_title(value)}.")
        np.save(sink, value, allow_pickle=False)
    elif kind == "npz":
        arrays = {str(i): one for i, one in enumerate(value)} if isinstance(value, tuple) else value
        if not isinstance(arrays, Mapping) or not all(isinstance(one, np.ndarray) for one in arrays.values()):
            raise ConfigError(f"a .npz file holds named arrays; received a {_title(value)}.")
        np.savez(sink, **{str(name): one for name, one in arrays.items()})
    elif kind == "jsonl":
        rows = _as_table(value, kind).to_pylist()
        return "".join(json.dumps(row, default=str) + "\n" for row in rows).encode()
    elif kind == "parquet":
        pq.write_table(_as_table(value, kind), sink, compression="zstd")
    else:
        try:
            pa.csv.write_csv(_flat(_as_table(value, kind)), sink)
        except pa.ArrowException as exc:
            raise ConfigError(
                f"this table cannot be written as CSV: {_first(exc)}.\nHint: .parquet can hold it."
            ) from exc
    return sink.getvalue()


def _as_table(value: Any, kind: str) -> pa.Table:
    if isinstance(value, pa.Table):
        return value
    if type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "columns"):
        return pa.Table.from_pandas(value, preserve_index=False)
    if isinstance(value, np.ndarray) and value.ndim in (1, 2):
        columns = value[:, None] if value.ndim == 1 else value
        return pa.table({str(i): columns[:, i] for i in range(columns.shape[1])})
    raise ConfigError(f"a .{kind} file holds a table; received a {_title(value)}.")


def _flat(table: pa.Table) -> pa.Table:
    """Columns of lists of one length as columns of numbers: CSV has no lists."""
    columns: dict[str, Any] = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        lists = column.storage if isinstance(column, pa.ExtensionArray) else column
        if isinstance(lists, pa.FixedSizeListArray):
            width, values = lists.type.list_size, lists.flatten()
            columns |= {
                f"{name}_{i}": values.take(pa.array(range(i, len(values), width))) for i in range(width)
            }
        else:
            columns[name] = column
    return pa.table(columns)


def _plain(value: Any) -> Any:
    if isinstance(value, pa.Table):
        return json.loads(json.dumps(value.to_pylist(), default=str))
    if type(value).__module__.partition(".")[0] == "pandas":
        return _plain(_as_table(value, "json"))
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(inside) for name, inside in value.items()}
    return [_plain(inside) for inside in value] if isinstance(value, list | tuple) else value


def _title(value: Any) -> str:
    return "table" if isinstance(value, pa.Table) else type(value).__qualname__


def _first(error: BaseException) -> str:
    return first_line(error).rstrip(".")
