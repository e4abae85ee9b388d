"""TFRecord files as pandas DataFrames, a shard a file; the reading is `kindler.data.tfrecord`'s."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from kindler.data.shards import frames
from kindler.data.shards.codec import Packed, from_table, pack, unpack
from kindler.data.tfrecord.files import Compression
from kindler.data.tfrecord.reading import SAMPLE_ROWS, Plan, batches, plan
from kindler.data.tfrecord.schema import SchemaLike
from kindler.readers.files import Paths, at_home, listed
from kindler.xshards import XShards, backends


def read_tfrecord(
    file_path: Paths,
    schema: SchemaLike | None = None,
    *,
    columns: Sequence[str] | None = None,
    compression: Compression = "auto",
    verify: bool = True,
    binary: Collection[str] = (),
    sample_rows: int | None = SAMPLE_ROWS,
    home: str = "auto",
    num_shards: int | None = None,
) -> XShards:
    """TFRecord files of tf.train.Example as shards of pandas DataFrames, one a file.

    Args:
        file_path: A file, a folder, a glob, a URI, or a list of them.
        schema: As for `kindler.tfrecord.read`, as are the next five; without it a sample tells.
        columns: Which columns, in this order; all if not given.
        compression: "gzip", None, or "auto" to look at each file.
        verify: Check the data's checksums.
        binary: Columns of bytes that are not text, though they may look like it.
        sample_rows: How many records the schema is inferred from; None for all.
        home: "local", "spark", or "auto": Spark if a session is running, else local. Every worker must find
            the files under the same path.
        num_shards: Deal out the rows evenly to so many shards. Default: a shard a file.

    Returns:
        Shards in the order of the files; cells of lists and tensors are arrays of one axis.

    Raises:
        ConfigError: No such file or column.
        DataError: A file is damaged, or a record is not as the schema says.
    """
    where = backends.choose(home)
    ask = partial(plan, listed(file_path), schema, columns, compression, verify, binary, sample_rows)
    planned: Plan = at_home(where, ask)
    named = backends.put(map(pack, planned.files), where)
    shards = XShards(named.mapped(_ReadRecords(planned), by_user=True))
    return shards if num_shards is None else shards.repartition(num_shards)


@dataclass(frozen=True)
class _ReadRecords:
    """In a worker: the name of a file becomes its rows."""

    planned: Plan

    def __call__(self, number: int, packed: Packed) -> Packed:
        table = pa.Table.from_batches(batches(self.planned, unpack(packed)), self.planned.schema)
        return from_table(frames.plain(from_table(table.replace_schema_metadata(None))))
