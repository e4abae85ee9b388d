"""`zoo.orca.data.image`: images with labels, masks and boxes; images in Parquet files."""

from kindler.compat.zoo.orca.data.image import parquet_dataset
from kindler.compat.zoo.orca.data.image.parquet_dataset import *  # noqa: F403
from kindler.compat.zoo.orca.data.image.preprocessing import read_images, read_voc

__all__ = ["read_images", "read_voc", *parquet_dataset.__all__]  # noqa: PLE0604
