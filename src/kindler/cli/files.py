"""Files of rows that commands read and write: CSV, JSON, JSON lines, Parquet, .npy and .npz."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from kindler.errors import ConfigError, DataError, first_line
from kindler.models.arrow_columns import as_column, as_table

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Rows: TypeAlias = pa.Table | dict[str, Array]  # arrays by name; "" if there is only one, without a name

FORMATS = ("csv", "json", "jsonl", "parquet", "npy", "npz")
_EXTENSIONS = f"one of {', '.join('.' + name for name in FORMATS)}"


def to_store(path: Path) -> Any:
    """The object to store for a file: its path if the store reads that kind itself, else its content."""
    if not path.exists():
        raise ConfigError(f"{str(path)!r} does not exist.")
    kind = path.suffix.lower().removeprefix(".")
    return _parsed(path.read_bytes(), kind, str(path)) if kind in ("csv", "jsonl", "npz") else path


def read_rows(path: str, kind: str | None) -> Rows:
    """The rows of a file, or of standard input if the path is "-". Without a kind it is detected from the
    name, or from the first characters."""
    content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    suffix = Path(path).suffix.lower().removeprefix(".")
    if kind is None and path == "-":
        kind = "json" if content.lstrip()[:1] in (b"[", b"{") else "csv"
    elif kind is None and suffix not in FORMATS:
        raise ConfigError(f"{path} has an unknown extension; expected {_EXTENSIONS}.\nHint: pass --format.")
    return _parsed(content, kind or suffix, "the input" if path == "-" else path)


def as_columns(arrays: Mapping[str, Array]) -> pa.Table:
    """A table of arrays: rows of several numbers as tensors of fixed shape."""
    for name, array in arrays.items():
        if not array.ndim:
            raise DataError(f"{name or 'the array'} is a single value; expected an array of rows.")
    return pa.table({name: as_column(array) for name, array in arrays.items()})


def write(value: Any, path: Path | None) -> None:
    """Write a value to a file, in the format of its extension; without a path, print it."""
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


def _parsed(content: bytes, kind: str, shown: str) -> Rows:
    file = io.BytesIO(content)
    try:
        if kind in ("csv", "jsonl", "parquet"):
            read = {"csv": pa.csv.read_csv, "jsonl": pa.json.read_json, "parquet": pq.read_table}[kind]
            return read(file)
        if kind == "json":
            return _from_json(json.loads(content))
        loaded: Any = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray) != (kind == "npy"):
            raise ValueError(f"it holds {'one array' if kind == 'npz' else 'several arrays'}")
        return {"": loaded} if kind == "npy" else dict(loaded)
    except (pa.ArrowException, OSError, EOFError, ValueError, TypeError) as exc:
        hint = "\nHint: expected a list of rows, a list of objects, or an object of lists."
        reason = f"{first_line(exc).rstrip('.')}.{hint if kind == 'json' else ''}"
        raise DataError(f"{shown} cannot be read as {kind}: {reason}") from exc


def _from_json(value: Any) -> Rows:
    if isinstance(value, dict):
        return pa.table({name: pa.array(items) for name, items in value.items()})
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return pa.Table.from_pylist(value)
    array = np.array(value)
    if not isinstance(value, list) or not value or array.dtype.kind not in "biufU":
        raise ValueError("it does not hold rows")
    return {"": array}


def _content(value: Any, kind: str) -> bytes:
    if kind == "json":
        return f"{json.dumps(_plain(value))}\n".encode()
    sink = io.BytesIO()
    arrays = {str(i): one for i, one in enumerate(value)} if isinstance(value, tuple) else value
    if kind == "npy" and isinstance(value, np.ndarray):
        np.save(sink, value, allow_pickle=False)
    elif kind == "npz" and isinstance(arrays, Mapping) and _are_arrays(arrays):
        np.savez(sink, **{str(name): one for name, one in arrays.items()})
    elif kind in ("npy", "npz"):
        holds = "one array" if kind == "npy" else "named arrays"
        raise ConfigError(f"a .{kind} file holds {holds}; received a {_title(value)}.")
    elif kind == "jsonl":
        rows = _as_table(value, kind).to_pylist()
        return "".join(json.dumps(row, default=str) + "\n" for row in rows).encode()
    elif kind == "parquet":
        pq.write_table(_as_table(value, kind), sink, compression="zstd")
    else:
        try:
            pa.csv.write_csv(_flat(_as_table(value, kind)), sink)
        except pa.ArrowException as exc:
            reason = first_line(exc).rstrip(".")
            raise ConfigError(
                f"this table cannot be written as CSV: {reason}.\nHint: .parquet can hold it."
            ) from exc
    return sink.getvalue()


def _are_arrays(arrays: Mapping[Any, Any]) -> bool:
    return all(isinstance(one, np.ndarray) for one in arrays.values())


def _title(value: Any) -> str:
    return type(value).__qualname__.lower()


def _as_table(value: Any, kind: str) -> pa.Table:
    if isinstance(value, np.ndarray) and value.ndim in (1, 2):
        columns = value[:, None] if value.ndim == 1 else value
        return pa.table({str(i): columns[:, i] for i in range(columns.shape[1])})
    if not isinstance(value, pa.Table) and not hasattr(value, "iloc"):
        raise ConfigError(f"a .{kind} file holds a table; received a {_title(value)}.")
    return as_table(value)


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
    if isinstance(value, pa.Table) or hasattr(value, "iloc"):
        return json.loads(json.dumps(as_table(value).to_pylist(), default=str))
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(inside) for name, inside in value.items()}
    return [_plain(inside) for inside in value] if isinstance(value, list | tuple) else value
