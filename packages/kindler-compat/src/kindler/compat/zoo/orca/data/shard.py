"""`zoo.orca.data.shard`."""

from __future__ import annotations

from kindler.compat.zoo.orca.data import SharedValue, SparkXShards, XShards

__all__ = ["SharedValue", "SparkXShards", "XShards"]
