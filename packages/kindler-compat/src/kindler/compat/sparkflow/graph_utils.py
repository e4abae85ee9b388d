"""Graphs as text, and the options of optimizers as text: what parameters of `SparkAsyncDL` hold."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from kindler.compat.sparkflow.graphs import json_format, speaking_v1, tf
from kindler.errors import ConfigError


def build_graph(func: Callable[[], Any]) -> str:
    """Run a function that builds a graph of TensorFlow 1, and return the graph as text.

    While it runs, the module `tensorflow` is TensorFlow 1 for the whole process: for the function, for what
    it calls in other modules, and for what it imports.

    The loss is the one that a function of `tf.losses` made; where there is none, or several, it is the tensor
    that the function returned.

    The text is a `MetaGraphDef` as protobuf's JSON.
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
                f"the function created no loss with tf.losses and returned {returned!r}.\n"
                "Hint: return the loss, a tensor."
            )
        warnings.warn(
            f"the function created {len(losses)} losses and returned none of them; the first,"
            f" {losses[0].name!r}, is trained.",
            stacklevel=3,
        )
        return
    loss = returned if returned.shape.rank == 0 else tf.reduce_mean(returned)
    graph.clear_collection(tf.GraphKeys.LOSSES)
    graph.add_to_collection(tf.GraphKeys.LOSSES, loss)


def generate_config(**kwargs: Any) -> str:
    return json.dumps(kwargs)


def _builder(name: str, **defaults: Any) -> Callable[..., str]:
    """A function that writes the options of an optimizer of `tf.train` as text."""
    names = {"initial_accumulator": "initial_accumulator_value"}
    takes = Signature([Parameter(n, Parameter.POSITIONAL_OR_KEYWORD, default=v) for n, v in defaults.items()])

    def build(*args: Any, **kwargs: Any) -> str:
        bound = takes.bind(*args, **kwargs)
        bound.apply_defaults()
        return generate_config(**{names.get(name, name): value for name, value in bound.arguments.items()})

    build.__name__ = build.__qualname__ = name
    build.__signature__ = takes  # type: ignore[attr-defined]
    return build


_RATE, _LOCKING = {"learning_rate": 0.001}, {"use_locking": False}
build_adam_config = _builder("build_adam_config", **_RATE, beta1=0.9, beta2=0.999, epsilon=1e-8, **_LOCKING)
build_rmsprop_config = _builder(
    "build_rmsprop_config", **_RATE, decay=0.9, momentum=0.0, epsilon=1e-10, **_LOCKING, centered=False
)
build_momentum_config = _builder(
    "build_momentum_config", **_RATE, momentum=0.9, **_LOCKING, use_nesterov=False
)
build_adadelta_config = _builder("build_adadelta_config", **_RATE, rho=0.95, epsilon=1e-8, **_LOCKING)
build_adagrad_config = _builder("build_adagrad_config", **_RATE, initial_accumulator=0.1, **_LOCKING)
build_gradient_descent = _builder("build_gradient_descent", **_RATE, **_LOCKING)
