"""`ZooOptimizer`: marks the optimizer of a program whose `train_op` TFPark is to distribute."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from kindler.errors import ConfigError

__all__ = ["ZooOptimizer"]


def _passed(method: str) -> Any:
    return lambda self, *args, **kwargs: getattr(self._optimizer, method)(*args, **kwargs)


class ZooOptimizer(tf.train.Optimizer):  # type: ignore[misc]
    """An optimizer of `tf.train` that makes its usual steps, with the gradients of all workers.

    Kindler finds the gradients in any `train_op`, so this only passes calls on.

    Args:
        optimizer: An optimizer of `tf.train`.
        name: A name for its operations.
    """

    def __init__(self, optimizer: Any, name: str | None = None) -> None:
        if not isinstance(optimizer, tf.train.Optimizer):
            raise ConfigError(
                f"ZooOptimizer takes a tf.train.Optimizer; received {type(optimizer).__qualname__}."
            )
        super().__init__(use_locking=False, name=name or f"Zoo{type(optimizer).__name__}")
        self._optimizer = optimizer

    compute_gradients = _passed("compute_gradients")
    apply_gradients = _passed("apply_gradients")
    get_slot = _passed("get_slot")
    get_slot_names = _passed("get_slot_names")
    variables = _passed("variables")
