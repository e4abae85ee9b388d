"""TFRecord files as pandas DataFrames, a shard a file; the reading is `kindler.data.tfrecord`'s."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from kindler.data.shards import frames
from kindler.data.shards.codec import Packed, from_table, pack, unpack
from kindler.data.tfrecord.decode import Plan, ReadOptions, batches, plan
from kindler.data.tfrecord.schema import SchemaLike
from kindler.readers.files import Paths, at_home, listed
from kindler.xshards import XShards, backends

if TYPE_CHECKING:
    from typing_extensions import Unpack


def read_tfrecord(
    file_path: Paths,
    schema: SchemaLike | None = None,
    *,
    home: str = "auto",
    num_shards: int | None = None,
    **options: Unpack[ReadOptions],
) -> XShards:
    """TFRecord files of tf.train.Example as shards of pandas DataFrames, one a file.

    Args:
        file_path: A file, a folder, a glob, a URI, or a list of them.
        schema: As for `kindler.tfrecord.read`; without it a sample tells.
        home: "local", "spark", or "auto": Spark if a session is running, else local. Every worker must find
            the files under the same path.
        num_shards: Deal out the rows evenly to so many shards. Default: a shard a file.
        options: `columns`, `compression`, `verify`, `binary` and `sample_rows` of `kindler.tfrecord.read`.

    Returns:
        Shards in the order of the files; cells of lists and tensors are arrays of one axis.

    Raises:
        ConfigError: No such file or column.
        DataError: A file is damaged, or a record is not as the schema says.
    """
    where = backends.choose(home)
    ask = partial(plan, listed(file_path), schema, **options)
    planned: Plan = at_home(where, ask)
    named = backends.put(map(pack, planned.files), where)
    shards = XShards(named.mapped(partial(_read_records, planned), by_user=True))
    return shards if num_shards is None else shards.repartition(num_shards)


def _read_records(planned: Plan, number: int, packed: Packed) -> Packed:
    """In a worker: the name of a file becomes its rows."""
    table = pa.Table.from_batches(batches(planned, unpack(packed)), planned.schema)
    return from_table(frames.plain(from_table(table.replace_schema_metadata(None))))
