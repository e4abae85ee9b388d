"""The `Estimator`, and what is behind it: checks of arguments, kinds of data, and runs."""

from kindler.estimator.estimator import Estimator

__all__ = ["Estimator"]
