"""`zoo.orca.data.image`: images with labels, masks and boxes; images in Parquet files."""

from __future__ import annotations

from kindler.compat.zoo.orca.data.image.parquet_dataset import (
    ParquetDataset,
    read_parquet,
    write_from_directory,
    write_mnist,
    write_ndarrays,
    write_parquet,
    write_voc,
)
from kindler.compat.zoo.orca.data.image.preprocessing import read_images, read_voc

__all__ = [
    "ParquetDataset",
    "read_images",
    "read_parquet",
    "read_voc",
    "write_from_directory",
    "write_mnist",
    "write_ndarrays",
    "write_parquet",
    "write_voc",
]
