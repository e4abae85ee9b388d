"""`zoo.orca.learn.tf`: Orca's estimator for TensorFlow 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kindler.compat.frameworks.tf_graph.legacy_keras import restore_legacy_keras

if TYPE_CHECKING:
    from kindler.compat.zoo.orca.learn.tf.estimator import Estimator as Estimator

__all__ = ["Estimator"]


def __getattr__(name: str) -> Any:
    if name != "Estimator":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kindler.compat.zoo.orca.learn.tf import estimator  # imports TensorFlow

    restore_legacy_keras()
    return estimator.Estimator
