"""TFRecord files at paths and URIs: which to read and as what, and how to write them whole or not at all.

The format is that of `kindler_tfrecord`, whose errors become DataErrors; see `kindler.tfrecord`.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import os
import posixpath
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import pyarrow as pa
from pyarrow import fs

import kindler_tfrecord
from kindler.data.arrays import is_local_data, kind, named, values
from kindler.data.paths import absolute, every_file, expand, file_system
from kindler.errors import ConfigError, DataError
from kindler_tfrecord import SchemaLike, TFRecordError

Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
Compression: TypeAlias = Literal["auto", "gzip"] | None

SAMPLE_ROWS = 1000
_GZIP_LEVEL = 6  # zlib's own, as TensorFlow has it
# Rows are encoded so many bytes at a time, which stay in the processor's cache until they are written.
_CHUNK_BYTES = 2 << 20
_MOVED = ("infer_schema", "iter_batches", "read", "scan", "write")


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"use kindler.tfrecord.{name}.", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module("kindler.tfrecord"), name)


class ReadOptions(TypedDict, total=False):
    """Arguments of `kindler.tfrecord.read`, except the schema."""

    columns: Sequence[str] | None
    compression: Compression
    verify: bool
    binary: Collection[str]
    sample_rows: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What to read; `known` lists the feature names that records may have, None allows any."""

    files: tuple[str, ...]
    schema: pa.Schema
    known: tuple[str, ...] | None
    compression: Compression
    verify: bool

    def batches(self, files: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for file in files:
            with opened(file, self.compression) as stream:
                yield from kindler_tfrecord.read_batches(
                    stream, self.schema, name=file, known=self.known, verify=self.verify
                )


def plan(
    path: Paths,
    schema: SchemaLike | None = None,
    columns: Sequence[str] | None = None,
    compression: Compression = "auto",
    verify: bool = True,
    binary: Collection[str] = (),
    sample_rows: int | None = SAMPLE_ROWS,
) -> Plan:
    if isinstance(columns, str) or isinstance(binary, str):
        raise ConfigError("columns and binary must be lists of names.\nHint: columns=['x'].")
    _check_compression(compression, ("auto", "gzip", None))
    files = tuple(find(path))
    known = None
    if schema is not None:
        try:
            wanted = kindler_tfrecord.as_schema(schema)
        except ValueError as exc:
            raise ConfigError(str(exc)) from None
    else:
        sample = sampled(files, compression, verify, binary, sample_rows)
        if not sample.names:
            others = f" and {len(files) - 1} other files" if len(files) > 1 else ""
            raise DataError(
                f"no record in {files[0]}{others} has a feature, so the columns are unknown.\n"
                "Hint: pass schema={...}."
            )
        known = tuple(sample.names)
        wanted = pa.schema([field.with_nullable(True) for field in sample])
    wanted = pa.schema([wanted.field(name) for name in chosen(wanted.names, columns)])
    return Plan(files, wanted, known, compression, verify)


def find(paths: Paths) -> list[str]:
    """Sorted within each path; folders at any depth, skipping names that start with "_" or "."."""
    places = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files = [file for path in places for file in expand(os.fspath(path), every_file)]
    if not files:
        raise ConfigError(f"no file in {[os.fspath(path) for path in places]}.")
    return files


def sampled(
    files: Sequence[str],
    compression: Compression,
    verify: bool,
    binary: Collection[str],
    sample_rows: int | None,
) -> pa.Schema:
    if sample_rows is not None and sample_rows < 1:
        raise ConfigError(f"sample_rows={sample_rows}: must be at least 1, or None for all.")
    sample = kindler_tfrecord.Sample(binary)
    for file in files:
        with opened(file, compression) as stream:
            for block in kindler_tfrecord.blocks(stream, file, verify=verify):
                sample.add(block if sample_rows is None else block.head(sample_rows - sample.records))
                if sample_rows is not None and sample.records >= sample_rows:
                    return sample.schema()
    return sample.schema()


def records(file: str) -> Iterator[bytes]:
    with opened(file) as stream:
        yield from kindler_tfrecord.records(stream, file)


@contextlib.contextmanager
def opened(file: str, compression: Compression = "auto") -> Iterator[Any]:
    """The content of a file; a TFRecordError about it is a DataError."""
    _check_compression(compression, ("auto", "gzip", None))
    system, path = file_system(file)
    try:
        raw = system.open_input_file(path)
    except FileNotFoundError:
        raise ConfigError(f"{file!r} does not exist.") from None
    with _data_errors(), raw:
        yield kindler_tfrecord.decompressed(raw, compression)


@contextlib.contextmanager
def _data_errors() -> Iterator[None]:
    try:
        yield
    except TFRecordError as exc:
        error = DataError(str(exc))
        error.column, error.row = exc.column, exc.row
        raise error from exc.__cause__


def write_files(
    data: Any,
    path: str,
    *,
    compression: Literal["gzip"] | None,
    rows_per_file: int | None,
    overwrite: bool,
    columns: Sequence[str] | None,
) -> list[str]:
    """See `kindler.tfrecord.write`."""
    part_name(0, compression)
    if rows_per_file is not None and rows_per_file < 1:
        raise ConfigError(f"rows_per_file={rows_per_file}: must be at least 1.")
    path = absolute(path)
    schema, batches = _batches(data, columns)
    check_types(schema)
    with staged(path, folder=rows_per_file is not None, overwrite=overwrite) as beside:
        if rows_per_file is None:
            write_rows(batches, beside, compression)
            return [path]
        names: list[str] = []
        for part in _parts(batches, rows_per_file):
            row, name = len(names) * rows_per_file, part_name(len(names), compression)
            write_rows(part, f"{beside}/{name}", compression, where=row.__add__)
            names.append(name)
        return [f"{path}/{name}" for name in names]


def check_types(schema: pa.Schema) -> None:
    with _data_errors():
        kindler_tfrecord.check_types(schema)
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise ConfigError(f"several columns are named {twice}; names must be unique.")


def write_rows(
    batches: Iterable[pa.RecordBatch],
    file: str,
    compression: Literal["gzip"] | None,
    *,
    where: Callable[[int], int | str] = int,
) -> None:
    """`where` names a row of the file in errors."""
    system, path = file_system(file)
    rows = 0

    def place(row: int) -> int | str:
        return where(rows + row)

    with _data_errors(), contextlib.ExitStack() as stack:
        out: Any = stack.enter_context(system.open_output_stream(path, compression=None))
        if compression == "gzip":
            # Without a time in it, the same rows give the same file.
            packed = gzip.GzipFile(filename="", fileobj=out, mode="wb", compresslevel=_GZIP_LEVEL, mtime=0)
            out = stack.enter_context(packed)
        for batch in batches:
            step = max(_CHUNK_BYTES * batch.num_rows // max(batch.nbytes, 1), 1)
            for start in range(0, batch.num_rows, step):
                chunk = batch.slice(start, step)
                out.write(kindler_tfrecord.encode(chunk, where=place).data)
                rows += chunk.num_rows


def part_name(number: int, compression: Compression) -> str:
    _check_compression(compression, ("gzip", None))
    return f"part-{number:05d}.tfrecord{'.gz' if compression else ''}"


def _check_compression(compression: Any, allowed: tuple[str | None, ...]) -> None:
    if compression not in allowed:
        raise ConfigError(f"compression={compression!r}: must be one of {list(allowed)}.")


def _parts(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[list[pa.RecordBatch]]:
    part: list[pa.RecordBatch] = []
    room = rows
    for batch in batches:
        while batch.num_rows >= room:
            part.append(batch.slice(0, room))
            yield part
            batch, part, room = batch.slice(room), [], rows
        if batch.num_rows:
            part.append(batch)
            room -= batch.num_rows
    if part:
        yield part


def _batches(data: Any, columns: Sequence[str] | None) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    if isinstance(data, pa.RecordBatchReader):
        names = chosen(data.schema.names, columns)
        return pa.schema([data.schema.field(name) for name in names]), (batch.select(names) for batch in data)
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        table = data if columns is None else data.select(chosen(data.schema.names, columns))
    else:
        table = _table(data, columns)
    return table.schema, iter(table.to_batches())


def _table(data: Any, columns: Sequence[str] | None) -> pa.Table:
    if not is_local_data(data) or isinstance(data, tuple | np.ndarray):
        raise ConfigError(
            f"data is {kind(data)}.\n"
            "Hint: pass a pyarrow Table, a pandas DataFrame, a dict of arrays, or a Spark DataFrame."
        )
    source = named(data).columns
    arrays = {name: _arrow_column(source[name], name) for name in chosen(list(source), columns)}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"columns have different lengths: {lengths}.")
    return pa.table(arrays)


def chosen(names: Sequence[str], columns: Sequence[str] | None) -> list[str]:
    if columns is None:
        return list(names)
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r} must be a list.\nHint: columns=[{columns!r}].")
    missing = [name for name in columns if name not in names]
    if missing:
        raise ConfigError(f"columns={list(columns)}: {missing} are not among {list(names)}.")
    return list(columns)


def _arrow_column(column: Any, name: str) -> pa.Array | pa.ChunkedArray:
    if hasattr(column, "iloc") and str(column.dtype) == "object":
        try:
            return pa.array(column, from_pandas=True)  # None and NaN between strings are nulls
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            pass  # cells that are arrays of several axes
    array = values(column, name)
    if not isinstance(array, np.ndarray):
        return array
    if array.ndim == 1:
        return pa.array(array)
    width = int(np.prod(array.shape[1:]))
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(array).reshape(-1)), width)


class staged:
    """Writes under a temporary name; renamed on success, else removed. Without rename (S3) it is a copy."""

    def __init__(self, path: str, *, folder: bool, overwrite: bool) -> None:
        self.path, self.folder, self.overwrite = path.rstrip("/") or path, folder, overwrite
        parent, name = posixpath.split(self.path)
        self.beside = posixpath.join(parent, f".{name}.{uuid.uuid4().hex[:12]}.tmp")

    def __enter__(self) -> str:
        self.begin()
        return self.beside

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.discard()

    def begin(self) -> None:
        self._require_free()
        system, place = file_system(self.beside)
        system.create_dir(place if self.folder else posixpath.dirname(place) or ".", recursive=True)

    def commit(self) -> None:
        self._require_free()
        system, place = file_system(self.path)
        _, beside = file_system(self.beside)
        old = system.get_file_info(place).type
        if old == fs.FileType.NotFound or (old == fs.FileType.File and not self.folder):
            system.move(beside, place)
            return
        aside = f"{beside}.old"
        system.move(place, aside)
        try:
            system.move(beside, place)
        except BaseException:
            system.move(aside, place)
            raise
        _delete(system, aside)

    def discard(self) -> None:
        system, beside = file_system(self.beside)
        with contextlib.suppress(OSError):
            _delete(system, beside)

    def _require_free(self) -> None:
        system, place = file_system(self.path)
        if not self.overwrite and system.get_file_info(place).type != fs.FileType.NotFound:
            raise ConfigError(f"{self.path!r} already exists.\nHint: overwrite=True replaces it.")


def _delete(system: fs.FileSystem, path: str) -> None:
    kind = system.get_file_info(path).type
    if kind == fs.FileType.Directory:
        system.delete_dir(path)
    elif kind == fs.FileType.File:
        system.delete_file(path)
