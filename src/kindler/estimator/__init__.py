"""The `Estimator`, and what is behind it: arguments are checked, data is recognised, runs are started."""

from kindler.estimator.estimator import Estimator

__all__ = ["Estimator"]
