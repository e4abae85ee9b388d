"""`zoo.orca.learn.mxnet`: Orca's estimator for Gluon blocks of MXNet."""

from __future__ import annotations

from kindler.compat.zoo.orca.learn.mxnet.estimator import Estimator, create_config

__all__ = ["Estimator", "create_config"]
