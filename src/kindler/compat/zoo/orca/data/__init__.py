"""`zoo.orca.data`: partitioned data."""

from __future__ import annotations

from kindler.xshards import SharedValue, XShards

__all__ = ["SharedValue", "SparkXShards", "XShards"]

SparkXShards = XShards
