"""`zoo.orca.learn.tf2`: Orca's estimator for Keras."""

from __future__ import annotations

from kindler.compat.zoo.orca.learn.tf2.estimator import Estimator

__all__ = ["Estimator"]
