"""`zoo.orca.learn.openvino`: Orca's estimator for models of OpenVINO."""

from __future__ import annotations

from kindler.compat.zoo.orca.learn.openvino.estimator import Estimator

__all__ = ["Estimator"]
