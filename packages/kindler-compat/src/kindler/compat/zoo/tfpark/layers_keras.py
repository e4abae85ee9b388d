"""A frozen TensorFlow graph as a layer of Keras, in graphs and in eager programs."""

from __future__ import annotations

import base64
import importlib
from typing import Any

import tensorflow.compat.v1 as tf

from kindler.compat.zoo.tfpark.frozen import FrozenGraph
from kindler.errors import ConfigError

_CLASSES: dict[str, Any] = {}


def layer(frozen: FrozenGraph, keras: Any = None) -> Any:
    """A layer that computes the graph's outputs."""
    library = keras if keras is not None else importlib.import_module("keras")
    name = library.__name__.partition(".")[0]
    if name == "keras" and library.backend.backend() != "tensorflow":
        raise ConfigError(
            f"a TFNet can be a layer of Keras on TensorFlow; this one is on {library.backend.backend()}."
        )
    return layer_class(name)(frozen)


def layer_class(name: str) -> Any:
    if name not in _CLASSES:
        _CLASSES[name] = _define(importlib.import_module(name))
    return _CLASSES[name]


def _define(keras: Any) -> Any:
    @keras.saving.register_keras_serializable(package="kindler")
    class TFNetLayer(keras.layers.Layer):  # type: ignore[misc]
        """Runs a frozen graph."""

        def __init__(
            self, frozen: Any = None, *, graph: str = "", inputs: Any = (), outputs: Any = (), **options: Any
        ):
            super().__init__(trainable=False, **{k: v for k, v in options.items() if k != "trainable"})
            data = base64.b64decode(graph) if frozen is None else frozen.graph_def
            self.frozen = frozen or FrozenGraph(data, tuple(inputs), tuple(outputs))

        def call(self, inputs: Any) -> Any:
            several = inputs if isinstance(inputs, list | tuple) else [inputs]
            found = (
                _eagerly(self.frozen, several) if tf.executing_eagerly() else _in_graph(self.frozen, several)
            )
            return found[0] if len(found) == 1 else list(found)

        def get_config(self) -> dict[str, Any]:
            return {
                **super().get_config(),
                "graph": base64.b64encode(self.frozen.graph_def).decode(),
                "inputs": list(self.frozen.inputs),
                "outputs": list(self.frozen.outputs),
            }

    return TFNetLayer


def _in_graph(frozen: FrozenGraph, inputs: Any) -> list[Any]:
    named = dict(zip(frozen.inputs, inputs, strict=True))
    graph_def = tf.GraphDef.FromString(frozen.graph_def)
    return list(
        tf.import_graph_def(graph_def, input_map=named, return_elements=list(frozen.outputs), name="tfnet")
    )


def _eagerly(frozen: FrozenGraph, inputs: Any) -> list[Any]:
    """As a function of TensorFlow, which gradients flow through."""
    return list(tf.function(lambda *given: _in_graph(frozen, given))(*map(tf.convert_to_tensor, inputs)))
