"""Files as `XShards`: CSV, JSON, Parquet and TFRecord files as pandas DataFrames, images as arrays.

The workers of the shards' home read the files, so neither the driver nor Spark's JVM sees a row.
"""

from __future__ import annotations

from kindler.readers.csv_json import read_csv, read_json
from kindler.readers.images import read_images
from kindler.readers.parquet import read_parquet
from kindler.readers.tfrecord import read_tfrecord

__all__ = ["read_csv", "read_images", "read_json", "read_parquet", "read_tfrecord"]
