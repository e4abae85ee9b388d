"""Graphs as text, and the options of optimizers as text: what parameters of `SparkAsyncDL` hold."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

from kindler.compat.sparkflow.tensorflow_v1 import json_format, speaking_v1, tf
from kindler.errors import ConfigError

__all__ = [
    "build_adadelta_config",
    "build_adagrad_config",
    "build_adam_config",
    "build_gradient_descent",
    "build_graph",
    "build_momentum_config",
    "build_rmsprop_config",
    "generate_config",
]


def build_graph(func: Callable[[], Any]) -> str:
    """Run a function that builds a graph of TensorFlow 1, and return the graph as text.

    While it runs, the module `tensorflow` is TensorFlow 1 for the whole process: for the function, for what
    it calls in other modules, and for what it imports.

    The loss is the one that a function of `tf.losses` made; where there is none, or several, it is the tensor
    that the function returned.

    Args:
        func: Anything that is called without arguments, and makes placeholders, variables and a loss.

    Returns:
        A `MetaGraphDef` as protobuf's JSON.
    """
    with tf.Graph().as_default() as graph, speaking_v1():
        _settle_loss(graph, func())
        meta_graph = tf.train.export_meta_graph(graph=graph, clear_devices=True)
    return str(json_format().MessageToJson(meta_graph))


def _settle_loss(graph: Any, returned: Any) -> None:
    losses = graph.get_collection(tf.GraphKeys.LOSSES)
    if len(losses) == 1:
        return
    if not isinstance(returned, tf.Tensor):
        if not losses:
            raise ConfigError(
                f"the function made no loss with tf.losses and returned {returned!r}.\n"
                "Hint: return the loss, a tensor."
            )
        warnings.warn(
            f"the function made {len(losses)} losses and returned none of them; the first,"
            f" {losses[0].name!r}, is trained.",
            stacklevel=3,
        )
        return
    loss = returned if returned.shape.rank == 0 else tf.reduce_mean(returned)
    graph.clear_collection(tf.GraphKeys.LOSSES)
    graph.add_to_collection(tf.GraphKeys.LOSSES, loss)


def generate_config(**kwargs: Any) -> str:
    """Keyword arguments of an optimizer as text."""
    return json.dumps(kwargs)


def build_adam_config(
    learning_rate: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    use_locking: bool = False,
) -> str:
    """Options of `tf.train.AdamOptimizer`."""
    return generate_config(
        learning_rate=learning_rate, beta1=beta1, beta2=beta2, epsilon=epsilon, use_locking=use_locking
    )


def build_rmsprop_config(
    learning_rate: float = 0.001,
    decay: float = 0.9,
    momentum: float = 0.0,
    epsilon: float = 1e-10,
    use_locking: bool = False,
    centered: bool = False,
) -> str:
    """Options of `tf.train.RMSPropOptimizer`."""
    return generate_config(
        learning_rate=learning_rate,
        decay=decay,
        momentum=momentum,
        epsilon=epsilon,
        use_locking=use_locking,
        centered=centered,
    )


def build_momentum_config(
    learning_rate: float = 0.001, momentum: float = 0.9, use_locking: bool = False, use_nesterov: bool = False
) -> str:
    """Options of `tf.train.MomentumOptimizer`."""
    return generate_config(
        learning_rate=learning_rate, momentum=momentum, use_locking=use_locking, use_nesterov=use_nesterov
    )


def build_adadelta_config(
    learning_rate: float = 0.001, rho: float = 0.95, epsilon: float = 1e-8, use_locking: bool = False
) -> str:
    """Options of `tf.train.AdadeltaOptimizer`."""
    return generate_config(learning_rate=learning_rate, rho=rho, epsilon=epsilon, use_locking=use_locking)


def build_adagrad_config(
    learning_rate: float = 0.001, initial_accumulator: float = 0.1, use_locking: bool = False
) -> str:
    """Options of `tf.train.AdagradOptimizer`."""
    return generate_config(
        learning_rate=learning_rate, initial_accumulator_value=initial_accumulator, use_locking=use_locking
    )


def build_gradient_descent(learning_rate: float = 0.001, use_locking: bool = False) -> str:
    """Options of `tf.train.GradientDescentOptimizer`."""
    return generate_config(learning_rate=learning_rate, use_locking=use_locking)
