"""What the user handed in, as a value that travels to the workers and opens there as a spool.

The driver makes a source (`ParquetSource` for files, `arrow_source` for data in memory, and the
Spark side a `DeliveredSource`), every worker opens its own share of it, the driver closes it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kindler.data.ahead import ahead
from kindler.data.arrays import is_local_data, kind, named, values
from kindler.data.columns import Columns
from kindler.data.parquet import ParquetFiles, scan, schema, share
from kindler.data.plan import ColumnOptions
from kindler.data.spool import Spool, SpoolWriter
from kindler.errors import ConfigError, DataError

__all__ = [
    "DeliveredSource",
    "FolderSource",
    "ParquetSource",
    "Source",
    "arrow_source",
    "is_local_data",
    "kind",
    "parquet_source",
]

_CHUNK_BYTES = 8 << 20
_SCAN_AHEAD = 4


class Source(Protocol):
    """Rows for a gang of workers. Pickles; every row belongs to exactly one rank."""

    @property
    def columns(self) -> Columns:
        """What is read of each row."""

    def open(self, rank: int, size: int, scratch: Path) -> Spool:
        """The rows of `rank` out of `size` workers; what must be written goes below `scratch`."""

    def close(self) -> None:
        """On the driver, when the workers are done: leave nothing behind. May be called again."""


@dataclass(frozen=True, slots=True)
class ParquetSource:
    """Parquet files: each worker reads its own range of rows."""

    files: ParquetFiles
    columns: Columns

    def open(self, rank: int, size: int, scratch: Path) -> Spool:
        start, stop = share(self.files.rows, size, rank)
        writer = SpoolWriter(_fresh_folder(scratch), self.columns.all, rows=stop - start)
        batches = scan(self.files, self.columns.names, start, stop)
        # One thread decodes while this one checks and writes.
        decoded = ahead(batches, depth=_SCAN_AHEAD, name="kindler-scan")
        with writer, contextlib.closing(decoded):
            for batch in decoded:
                first = start + writer.rows
                writer.append(batch, lambda i, first=first: self.files.locate(first + i))  # type: ignore[misc]
        return writer.close()

    def close(self) -> None:
        """Nothing was made."""


@dataclass(frozen=True, slots=True)
class FolderSource:
    """One spool that the driver wrote: workers on its machine map their range of it."""

    folder: str
    columns: Columns

    def open(self, rank: int, size: int, scratch: Path) -> Spool:
        spool = Spool.open(self.folder)
        return spool.slice(*share(spool.rows, size, rank))

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class DeliveredSource:
    """Rows that someone else writes into each worker's scratch, as a spool of this name."""

    columns: Columns
    name: str

    def open(self, rank: int, size: int, scratch: Path) -> Spool:
        return Spool.open(scratch / self.name)

    def close(self) -> None:
        """What was written goes with the worker's scratch."""


def parquet_source(files: ParquetFiles, options: ColumnOptions | None = None) -> ParquetSource:
    """A source of Parquet files whose columns were checked, in every file, before anything starts."""
    found = schema(files)
    columns = (options or ColumnOptions()).plan(dict(zip(found.names, found.types, strict=True)))
    schema(files, columns.names)
    return ParquetSource(files, columns)


def arrow_source(data: Any, options: ColumnOptions | None = None, *, scratch: Path) -> FolderSource:
    """Data in memory, written to a spool in a new folder below `scratch`.

    Args:
        data: See `kindler.data.arrays.named` for the forms.
        options: Which columns; a form that says what are inputs and targets answers what is left open.
        scratch: A folder on this machine.

    Raises:
        ConfigError: Not data, columns of different lengths, or options that do not fit it.
        DataError: No rows, or a value that cannot feed a model.
    """
    asked = options or ColumnOptions()
    found = named(data).called(asked.features, asked.labels)
    if asked.feature_cols is None:
        asked = replace(asked, feature_cols=found.features)
    if asked.label_cols is None and asked.need_labels:
        asked = replace(asked, label_cols=found.labels)
    columns = asked.plan(found.types)
    arrays = {name: values(found.columns[name], name) for name in columns.names}
    rows = _one_length({name: len(array) for name, array in arrays.items()})
    if not rows:
        raise DataError(f"{kind(data)} has no rows.")
    folder = _fresh_folder(scratch)
    try:
        _write(folder, columns, arrays, rows)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return FolderSource(str(folder), columns)


def _write(folder: Path, columns: Columns, arrays: Mapping[str, Any], rows: int) -> None:
    """In chunks, so that a cast never holds a second copy of everything."""
    widest = max(array.nbytes // rows for array in arrays.values())
    step = max(_CHUNK_BYTES // max(widest, 1), 1)
    with SpoolWriter(folder, columns.all, rows=rows) as writer:
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            writer.append_arrays({name: _part(array, start, stop) for name, array in arrays.items()})


def _part(array: Any, start: int, stop: int) -> Any:
    return array[start:stop] if isinstance(array, np.ndarray) else array.slice(start, stop - start)


def _one_length(lengths: Mapping[str, int]) -> int:
    first = next(iter(lengths))
    for name, length in lengths.items():
        if length != lengths[first]:
            raise ConfigError(
                f"columns {first!r} and {name!r} have different lengths: {lengths[first]} and {length}."
            )
    return lengths[first]


def _fresh_folder(scratch: Path) -> Path:
    scratch.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="spool-", dir=scratch))
