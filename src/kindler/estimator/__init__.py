"""The front door, and the three files behind it: arguments checked, a run started, rows scored."""

from kindler.estimator.estimator import Estimator

__all__ = ["Estimator"]
