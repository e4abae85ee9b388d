"""Which Spark DataFrames are provably nothing but the Parquet files behind them.

The proof is a list of what must hold; whatever is not on it goes through Spark.

- The optimized plan is one Parquet scan, with nothing but choices of columns above it, and no column has got
  the name of another on the way (`direct_plans`). So a row of the frame is a row of a file.
- The files are those of the scan's own list, as often as it has them, and as long as they were then. So no
  row is missing, and none is there twice.
- No column that is wanted comes from the names of folders, which win over what is in the files.
- Every file holds every wanted column once, under the frame's own type in full, dates counted in today's
  calendar (`direct_files`). So Spark would convert, fill in or rebase nothing.
- No setting of the session makes Spark leave out files it cannot read, find columns by number, or shift
  timestamps (`_SETTINGS`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from kindler.data import parquet
from kindler.errors import ConfigError, KindlerError
from kindler.spark.direct_files import StoredColumns
from kindler.spark.direct_plans import NotPlain, check_folders, classic_scan, connect_scan
from kindler.spark.files import each_file
from kindler.spark.frames import arrow_types
from kindler.spark.session import is_connect

_SETTINGS = (
    "spark.sql.files.ignoreCorruptFiles",
    "spark.sql.files.ignoreMissingFiles",
    "spark.sql.parquet.fieldId.read.enabled",
    "spark.sql.parquet.int96TimestampConversion",
)
# Spark's own names for where a row is stored: a column called so would hide them.
_RESERVED = ("_metadata", "_tmp_metadata_row_index")


@dataclass(frozen=True)
class PlainScan:
    """The files behind a frame.

    Attributes:
        files: The files, one that is scanned twice being there twice.
        columns: What they must hold, for whoever opens them later.
    """

    files: parquet.ParquetFiles
    columns: StoredColumns


def plain_parquet(frame: DataFrame, names: Sequence[str], *, must: bool = False) -> PlainScan | None:
    """The files behind a frame that is provably nothing but a scan of them, or None.

    Args:
        frame: Any DataFrame.
        names: The columns that are wanted from it.
        must: Raise ConfigError with the reason instead of returning None.
    """
    try:
        return _inspect(frame, names)
    except NotPlain as reason:
        if must:
            raise ConfigError(
                "ingest='direct' needs a plain Parquet scan, at most with a selection of columns;"
                f" {reason}.\nHint: ingest='auto' or 'inline' accepts any DataFrame."
            ) from None
        return None


def _inspect(frame: DataFrame, names: Sequence[str]) -> PlainScan:
    if frame.isStreaming:
        raise NotPlain("it is a streaming DataFrame")
    _check_names(frame.columns, names)
    types = arrow_types(frame)
    unknown = [name for name in names if types[name] is None]
    if unknown:
        raise NotPlain(f"Arrow has no type for its columns {unknown}")
    columns = StoredColumns({name: types[name] for name in names})
    scan = connect_scan if is_connect(frame.sparkSession) else classic_scan
    scanned = scan(frame, names)
    check_folders(scanned, names)
    _check_settings(frame.sparkSession)
    lengths = {file.path: file.length for file in scanned}
    try:
        files = parquet.inspect_files(
            [file.path for file in scanned],
            partial(_check_file, columns=columns, lengths=lengths),
            partial(each_file, frame.sparkSession),
        )
    except (OSError, KindlerError) as exc:
        raise NotPlain(f"its files cannot be read from this process ({exc})") from None
    return PlainScan(files, columns)


def _check_names(there: Sequence[str], names: Sequence[str]) -> None:
    folded = Counter(name.lower() for name in there)
    for name in names:
        if folded[name.lower()] > 1:
            raise NotPlain(f"it has several columns called {name!r}, ignoring case")
    if any(reserved in folded for reserved in _RESERVED):
        raise NotPlain(f"it has a column with a reserved name, one of {list(_RESERVED)}")


def _check_settings(spark: SparkSession) -> None:
    for key in _SETTINGS:
        if (spark.conf.get(key, "false") or "false").lower() != "false":
            raise NotPlain(f"the session has {key}=true")


def _check_file(
    path: str, opened: pq.ParquetFile, *, columns: StoredColumns, lengths: Mapping[str, int | None]
) -> None:
    planned = lengths[path]
    if planned is not None and planned != parquet.file_length(path):
        raise NotPlain(f"{path} has changed since the DataFrame was created")
    problem = columns.problem(opened)
    if problem is not None:
        raise NotPlain(problem)
