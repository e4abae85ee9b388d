"""Files of a saved stage, written and read by Spark itself.

As Spark's own models do, a stage keeps its data in Parquet beside its metadata. So it can be saved wherever
Spark can write, on classic sessions and on Spark Connect, where this process may not see the files at all. A
row is a piece of a file: its name, where the piece begins, and its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from kindler.errors import ConfigError
from kindler.spark.versions import from_arrow
from kindler.store.names import check_path

_PIECE = 8 << 20
_PARTITION = 256 << 20  # a partition is collected at once
_SCHEMA = pa.schema([("name", pa.string()), ("begin", pa.int64()), ("bytes", pa.binary())])


def write_folder(spark: Any, folder: Path, path: str) -> None:
    """Write all files below a folder to a Parquet folder that does not exist yet."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    rows = [(file.relative_to(folder).as_posix(), *piece) for file in files for piece in _pieces(file)]
    columns = list(zip(*rows, strict=True)) if rows else [(), (), ()]
    table = pa.table([list(column) for column in columns], schema=_SCHEMA)
    partitions = max(1, -(-table.nbytes // _PARTITION))
    from_arrow(spark, table).coalesce(partitions).write.option("compression", "zstd").parquet(path)


def read_folder(spark: Any, path: str, folder: Path) -> None:
    """Write the files of such a Parquet folder into an empty folder of this machine.

    Raises:
        ConfigError: A name in it would leave the folder.
    """
    for row in spark.read.parquet(path).select("name", "begin", "bytes").toLocalIterator():
        file = folder / check_path(row["name"])
        if row["begin"] < 0:
            raise ConfigError(f"{path}: a piece of the file {row['name']!r} begins at {row['begin']}.")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        with file.open("r+b") as out:
            out.seek(row["begin"])
            out.write(row["bytes"])


def _pieces(file: Path) -> Iterator[tuple[int, bytes]]:
    begin = 0
    with file.open("rb") as content:
        while piece := content.read(_PIECE):
            yield begin, piece
            begin += len(piece)
    if not begin:
        yield 0, b""
