"""`zoo.orca.learn.bigdl`: Orca's estimator for models of BigDL's layers."""

from __future__ import annotations

from kindler.compat.zoo.orca.learn.bigdl.estimator import Estimator

__all__ = ["Estimator"]
