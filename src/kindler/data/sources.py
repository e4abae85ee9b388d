"""What the user handed in, as a value that travels to the workers and opens there as a spool.

The driver makes a source (`ParquetSource` for files, `arrow_source` for data in memory, and the
Spark side a `DeliveredSource`), every worker opens its own share of it, the driver closes it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kindler.data.ahead import ahead
from kindler.data.arrays import is_local_data, kind, named, values
from kindler.data.columns import Columns
from kindler.data.parquet import ParquetFiles, scan, schema, share
from kindler.data.plan import Names, column_plan
from kindler.data.spool import Spool, SpoolWriter
from kindler.errors import ConfigError, DataError

__all__ = [
    "DeliveredSource",
    "FolderSource",
    "ParquetSource",
    "Source",
    "arrow_source",
    "column_plan",
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


def parquet_source(
    files: ParquetFiles,
    *,
    feature_cols: Names = None,
    label_cols: Names = None,
    dtypes: Mapping[str, Any] | None = None,
    shapes: Mapping[str, int | Sequence[int]] | None = None,
    stack_features: bool = False,
    allow_nan: bool | Sequence[str] = False,
    need_labels: bool = True,
) -> ParquetSource:
    """A source of Parquet files whose columns were checked, in every file, before anything starts."""
    found = schema(files)
    columns = column_plan(
        dict(zip(found.names, found.types, strict=True)),
        feature_cols,
        label_cols,
        dtypes=dtypes,
        shapes=shapes,
        stack_features=stack_features,
        allow_nan=allow_nan,
        need_labels=need_labels,
    )
    schema(files, columns.names)
    return ParquetSource(files, columns)


def arrow_source(
    data: Any,
    *,
    scratch: Path,
    feature_cols: Names = None,
    label_cols: Names = None,
    dtypes: Mapping[str, Any] | None = None,
    shapes: Mapping[str, int | Sequence[int]] | None = None,
    stack_features: bool = False,
    allow_nan: bool | Sequence[str] = False,
    need_labels: bool = True,
) -> FolderSource:
    """Data in memory, written to a spool in a new folder below `scratch`.

    Args:
        data: See `kindler.data.arrays.named` for the forms.
        scratch: A folder on this machine.
        feature_cols: As the other options: see `column_plan`.

    Raises:
        ConfigError: Not data, columns of different lengths, or options that do not fit it.
        DataError: No rows, or a value that cannot feed a model.
    """
    found = named(data)
    columns = column_plan(
        found.types,
        found.features if feature_cols is None else feature_cols,
        found.labels if label_cols is None and need_labels else label_cols,
        dtypes=dtypes,
        shapes=shapes,
        stack_features=stack_features,
        allow_nan=allow_nan,
        need_labels=need_labels,
    )
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
