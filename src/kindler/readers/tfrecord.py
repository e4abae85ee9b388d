"""TFRecord files as pandas DataFrames, one shard per file."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from kindler.data.shards import frames
from kindler.data.shards.codec import Packed, from_table, pack, unpack
from kindler.data.tfrecord import Plan, ReadOptions, plan
from kindler.readers.files import Paths, at_home, listed
from kindler.xshards import XShards, backends
from kindler_tfrecord import SchemaLike

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
    """Read TFRecord files of tf.train.Example into shards of pandas DataFrames, one per file.

    Args:
        file_path: A file, a folder, a glob, a URI, or a list of them.
        schema: As for `kindler.tfrecord.read`; inferred from a sample by default.
        home: "local", "spark", or "auto": Spark if a session is running, else local. Every worker must find
            the files under the same path.
        num_shards: The number of shards to distribute the rows over, evenly. Default: one per file.
        options: `columns`, `compression`, `verify`, `binary` and `sample_rows` of `kindler.tfrecord.read`.

    Returns:
        Shards in the order of the files; lists and tensors become one-dimensional arrays.

    Raises:
        ConfigError: There is no such file or column.
        DataError: A file is damaged, or a record does not match the schema.
    """
    where = backends.choose(home)
    ask = partial(plan, listed(file_path), schema, **options)
    planned: Plan = at_home(where, ask)
    named = backends.put(map(pack, planned.files), where)
    shards = XShards(named.mapped(partial(_read_records, planned), by_user=True))
    return shards if num_shards is None else shards.repartition(num_shards)


def _read_records(planned: Plan, number: int, packed: Packed) -> Packed:
    table = pa.Table.from_batches(planned.batches(unpack(packed)), planned.schema)
    return from_table(frames.plain(from_table(table.replace_schema_metadata(None))))
