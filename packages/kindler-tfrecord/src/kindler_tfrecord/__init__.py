"""TFRecord files of tf.train.Example to Arrow and back, with numpy and without TensorFlow."""

from __future__ import annotations

from kindler_tfrecord import varints
from kindler_tfrecord.decode import Sample, read_batches
from kindler_tfrecord.encode import encode
from kindler_tfrecord.framing import Block, TFRecordError, blocks, decompressed, framed, records
from kindler_tfrecord.schema import SchemaLike, as_schema, check_types

__version__ = "0.2.0"

__all__ = [
    "Block",
    "Sample",
    "SchemaLike",
    "TFRecordError",
    "as_schema",
    "blocks",
    "check_types",
    "decompressed",
    "encode",
    "framed",
    "read_batches",
    "records",
    "varints",
]
