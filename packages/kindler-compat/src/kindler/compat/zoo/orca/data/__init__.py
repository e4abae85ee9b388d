"""`zoo.orca.data`: partitioned data."""

from __future__ import annotations

from kindler.compat.zoo.orca.data.image import read_images
from kindler.xshards import SharedValue, XShards

__all__ = ["SharedValue", "SparkXShards", "XShards", "read_images"]

SparkXShards = XShards
