"""Read files into `XShards`: CSV, JSON, Parquet and TFRecord as pandas DataFrames, images as arrays.

The workers read the files, so that no row passes through the driver or Spark's JVM.
"""

from __future__ import annotations

from kindler.readers.csv_json import read_csv, read_json
from kindler.readers.images import read_images
from kindler.readers.tables import read_parquet, read_tfrecord

__all__ = ["read_csv", "read_images", "read_json", "read_parquet", "read_tfrecord"]
