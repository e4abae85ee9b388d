"""`XShards`, a partitioned collection of Python objects, and `SharedValue`, data that many shards need."""

from __future__ import annotations

from kindler.xshards.collection import XShards
from kindler.xshards.shared_value import SharedValue

__all__ = ["SharedValue", "XShards"]
