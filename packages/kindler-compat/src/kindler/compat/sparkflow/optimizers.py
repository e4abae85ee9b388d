"""Optimizers of TensorFlow 1 by SparkFlow's names."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from kindler.compat.sparkflow.tensorflow_v1 import tf
from kindler.errors import ConfigError

OPTIMIZERS = {
    "adam": "AdamOptimizer",
    "rmsprop": "RMSPropOptimizer",
    "momentum": "MomentumOptimizer",
    "adadelta": "AdadeltaOptimizer",
    "adagrad": "AdagradOptimizer",
    "gradient_descent": "GradientDescentOptimizer",
    "adagrad_da": "AdagradDAOptimizer",
    "ftrl": "FtrlOptimizer",
    "proximal_adagrad": "ProximalAdagradOptimizer",
    "proximal_gradient_descent": "ProximalGradientDescentOptimizer",
}
_OLD_NAMES = {"initial_accumulator": "initial_accumulator_value"}


def build_optimizer(optimizer_name: str, learning_rate: float, optimizer_options: Any = None) -> Any:
    made = _class_of(optimizer_name)
    options = {"learning_rate": learning_rate, "use_locking": False, **options_of(optimizer_options)}
    options = {_OLD_NAMES.get(name, name): value for name, value in options.items()}
    if optimizer_name == "momentum":
        options.setdefault("momentum", 0.9)
    if optimizer_name == "adagrad_da":
        options.setdefault("global_step", tf.train.get_or_create_global_step())
    known = list(inspect.signature(made.__init__).parameters)[1:]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(
            f"optimizerOptions: {optimizer_name!r} has no {', '.join(unknown)}; it has {', '.join(known)}."
        )
    return made(**options)


def options_of(given: Any) -> dict[str, Any]:
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    try:
        options = json.loads(given)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"optimizerOptions must be a JSON object; received {given!r}: {exc}") from exc
    if not isinstance(options, dict):
        raise ConfigError(f"optimizerOptions must be a JSON object; received {given!r}.")
    return options


def _class_of(name: str) -> Any:
    if name not in OPTIMIZERS:
        raise ConfigError(f"tfOptimizer={name!r}: there are {', '.join(OPTIMIZERS)}.")
    return getattr(tf.train, OPTIMIZERS[name])
