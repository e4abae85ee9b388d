"""`MirroredStrategyRunner` of spark-tensorflow-distributor, on Kindler's clusters."""

from __future__ import annotations

from kindler.compat.spark_tensorflow_distributor.mirrored_strategy_runner import MirroredStrategyRunner

__all__ = ["MirroredStrategyRunner"]
