"""`zoo.orca.learn.pytorch`: Orca's estimator for PyTorch."""

from __future__ import annotations

from kindler.compat.zoo.orca.learn.pytorch.estimator import Estimator

__all__ = ["Estimator"]
