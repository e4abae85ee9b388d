"""What programs pass as an optimizer, as what trains a graph; `ZooOptimizer`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from kindler.compat.bigdl.optim.methods import OptimMethod
from kindler.compat.bigdl.optim.rules_tf import graph_optimizer
from kindler.errors import ConfigError


def graph_optimizers(given: Any) -> Any:
    """An optimizer of `tf.train`, or a dict of them by the prefix of variable names."""
    if isinstance(given, Mapping):
        return {prefix: graph_optimizers(part) for prefix, part in given.items()}
    if isinstance(given, OptimMethod):
        given.refuse_used()
        return graph_optimizer(given)
    if isinstance(given, tf.train.Optimizer):
        return given
    if type(given).__name__ == "TFOptimizer" and hasattr(given, "optimizer"):  # Keras's wrapper of tf.train's
        return given.optimizer
    if hasattr(given, "apply_gradients") and hasattr(given, "get_config"):
        return _KerasOptimizer(given)
    raise ConfigError(
        "the optimizer must be one of bigdl.optim.optimizer, such as Adam(1e-3), or a tf.train.Optimizer;"
        f" received {type(given).__qualname__}."
    )


def methods_of(given: Any) -> list[OptimMethod]:
    """The BigDL optimizers among what was passed."""
    several = list(given.values()) if isinstance(given, Mapping) else [given]
    return [method for method in several if isinstance(method, OptimMethod)]


def counted(given: Any) -> tuple[int, int]:
    """Epochs and steps that the BigDL optimizers have made in earlier runs."""
    methods = methods_of(given)
    if not methods:
        return 0, 0
    return max(m.state["epoch"] for m in methods) - 1, max(m.state["neval"] for m in methods) - 1


class _KerasOptimizer(tf.train.Optimizer):  # type: ignore[misc]
    """An optimizer of Keras for graphs; clipping comes after workers have agreed on gradients."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(use_locking=False, name=type(optimizer).__name__)
        self._optimizer = optimizer
        self._lr_t: Any = None

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: str | None = None
    ) -> Any:
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]
        applied = self._optimizer.apply_gradients(pairs)
        decayed = getattr(self._optimizer, "_decayed_lr", None)
        if decayed is not None:
            self._lr_t = decayed(tf.float32)
        if global_step is None:
            return applied
        with tf.control_dependencies([applied]):
            return tf.assign_add(global_step, tf.ones_like(global_step)).op

    def variables(self) -> Any:
        return self._optimizer.weights


def _passed(method: str) -> Any:
    return lambda self, *args, **kwargs: getattr(self._optimizer, method)(*args, **kwargs)


class ZooOptimizer(tf.train.Optimizer):  # type: ignore[misc]
    """Makes the usual steps of an optimizer of `tf.train`, with the gradients of all workers.

    Kindler finds the gradients in any `train_op`, so this only passes calls on.
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
