"""What trains a graph: an optimizer of `tf.train`, a name of one, or one for each prefix of variables."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kindler.errors import ConfigError

_NAMES = {
    "adadelta": "AdadeltaOptimizer",
    "adagrad": "AdagradOptimizer",
    "adam": "AdamOptimizer",
    "ftrl": "FtrlOptimizer",
    "momentum": "MomentumOptimizer",
    "rmsprop": "RMSPropOptimizer",
    "sgd": "GradientDescentOptimizer",
}
_NEEDED = {
    "adagrad": {"learning_rate": 0.01},
    "ftrl": {"learning_rate": 0.01},
    "momentum": {"learning_rate": 0.01, "momentum": 0.9},
    "rmsprop": {"learning_rate": 0.001},
    "sgd": {"learning_rate": 0.01},
}


@dataclass(frozen=True, slots=True)
class Counters:
    """What a learning rate may depend on, as tensors.

    Attributes:
        step: Steps of the optimizer so far, the graph's global step.
        epoch: The number of the epoch that runs, from 1 on.
    """

    step: Any
    epoch: Any


def assigned(
    optimizer: Any, variables: Sequence[Any], counters: Callable[[], Counters]
) -> list[tuple[Any, list[Any]]]:
    """Each optimizer with the variables that it trains.

    Args:
        optimizer: What the user passed: see `Estimator.from_graph`.
        variables: All that the loss depends on.
        counters: Makes the tensors that schedules depend on; called only if one asks for them.

    Raises:
        ConfigError: It is no optimizer, or a prefix has no variables.
    """
    if not isinstance(optimizer, Mapping):
        return [(_made(optimizer, counters), list(variables))]
    by_prefix: dict[str, list[Any]] = {str(prefix): [] for prefix in optimizer}
    left: list[Any] = []
    for variable in variables:
        owner = _owner(variable.op.name, by_prefix)
        (left if owner is None else by_prefix[owner]).append(variable)
    names = [variable.op.name for variable in variables]
    for prefix, members in by_prefix.items():
        if not members:
            raise ConfigError(f"optimizer: no variable's name begins with {prefix!r}; there are {names}.")
    if left:
        warnings.warn(
            "these variables are not trained, because no prefix of optimizer= is theirs:"
            f" {[variable.op.name for variable in left]}.",
            stacklevel=2,
        )
    return [(_made(optimizer[prefix], counters), members) for prefix, members in by_prefix.items()]


def title(optimizer: Any) -> Any:
    """What to call it in records of a run."""
    if isinstance(optimizer, Mapping):
        return ", ".join(f"{prefix}: {title(part)}" for prefix, part in optimizer.items())
    return optimizer if isinstance(optimizer, str) else type(optimizer).__qualname__


def _owner(name: str, prefixes: Mapping[str, Any]) -> str | None:
    """The longest prefix of a variable's name; "dense" is none of "dense_1/kernel" if "dense_1" is one."""
    fitting = [prefix for prefix in prefixes if name.startswith(prefix)]
    return max(fitting, key=len, default=None)


def _made(optimizer: Any, counters: Callable[[], Counters]) -> Any:
    import tensorflow.compat.v1 as tf

    if isinstance(optimizer, str):
        name = optimizer.lower()
        if name not in _NAMES:
            raise ConfigError(f"optimizer={optimizer!r}: there are {', '.join(sorted(_NAMES))}.")
        return getattr(tf.train, _NAMES[name])(**_NEEDED.get(name, {}))
    if isinstance(optimizer, type) or (callable(optimizer) and not isinstance(optimizer, tf.train.Optimizer)):
        made = optimizer() if isinstance(optimizer, type) else optimizer(counters())
    else:
        made = optimizer
    if isinstance(made, tf.train.Optimizer):
        return made
    raise ConfigError(
        f"optimizer must be a tf.compat.v1.train.Optimizer; received {type(made).__qualname__}.\n"
        "Hint: it may also be a name such as 'adam', a dict from prefixes of variables' names to optimizers,"
        " or a function of counters (with step and epoch) that returns an optimizer. Keras's own optimizers"
        " go with Estimator.from_keras."
    )
