"""A graph that is text, opened in a session: its tensors, its loss, and the values of its variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kindler.compat.sparkflow.tensorflow_v1 import json_format, tf
from kindler.errors import ConfigError
from kindler.models.kind import require_trust
from kindler.models.safety.saved_model import graph_dangers

Array = np.ndarray[Any, np.dtype[Any]]


def meta_graph_of(text: str) -> Any:
    if not text:
        raise ConfigError("there is no graph; build_graph(function) of graph_utils makes one.")
    try:
        return json_format().Parse(text, tf.MetaGraphDef())
    except json_format().ParseError as exc:
        raise ConfigError(
            f"the graph is not the text that build_graph returns: {exc}.\n"
            "Hint: tensorflowGraph=build_graph(function)."
        ) from exc


def check_graph(text: str, *, trusted: bool) -> None:
    """Raise `UntrustedError` for a graph of a file that does more than compute, unless it is trusted."""
    found = graph_dangers(meta_graph_of(text).SerializeToString())
    if found:
        require_trust(trusted, what="the TensorFlow graph", reason=f"it has {', '.join(found)}")


@dataclass(frozen=True)
class OpenGraph:
    """A graph in a session of its own."""

    graph: Any
    sess: Any

    @classmethod
    def of(cls, text: str, *, seed: int | None = None) -> OpenGraph:
        """Open a graph, with the first values of its variables; `seed` decides what is drawn for them."""
        graph = tf.Graph()
        with graph.as_default():
            if seed is not None:
                tf.set_random_seed(seed)
            try:
                tf.train.import_meta_graph(_seeded(meta_graph_of(text), seed), clear_devices=True)
            except (ValueError, KeyError, tf.errors.OpError) as exc:
                raise ConfigError(f"TensorFlow cannot read the graph: {exc}") from exc
            sess = tf.Session(graph=graph)
            variables = [*tf.global_variables(), *tf.local_variables()]
            sess.run([variable.initializer for variable in variables])
        return cls(graph, sess)

    def tensor(self, name: str, param: str) -> Any:
        """A tensor by its name; "x" is "x:0"."""
        try:
            return self.graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
        except (KeyError, ValueError) as exc:
            there = [
                op.name + ":0" for op in self.graph.get_operations() if op.type.startswith("Placeholder")
            ]
            raise ConfigError(
                f"{param}={name!r}: the graph has no such tensor; its placeholders are {', '.join(there)}."
            ) from exc

    def loss(self) -> Any:
        """What is minimised: the first entry of the collection of losses."""
        losses = self.graph.get_collection(tf.GraphKeys.LOSSES)
        if not losses:
            raise ConfigError(
                "the graph has no loss.\n"
                "Hint: build_graph takes one of tf.losses, or what the function returns."
            )
        loss = losses[0]
        if loss.shape.rank != 0:
            with self.graph.as_default():
                loss = tf.reduce_mean(loss)
        return loss

    @property
    def trained(self) -> list[Any]:
        return list(self.graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES))

    def values(self) -> dict[str, Array]:
        """The values of all variables of the model, by their names."""
        variables = {v.name: v for v in self.graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)}
        return {name: np.asarray(value) for name, value in self.sess.run(variables).items()}

    def assign(self, values: Mapping[str, Array]) -> None:
        variables = {v.name: v for v in self.graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)}
        for name, value in values.items():
            if name not in variables:
                raise ConfigError(f"the graph has no variable {name!r}; it has {', '.join(variables)}.")
            _load(variables[name], value, self.sess)

    def assign_trained(self, weights: Sequence[Array]) -> None:
        """Give the trained variables these values, in their order."""
        trained = self.trained
        if len(weights) != len(trained):
            raise ConfigError(f"received {len(weights)} weights for {len(trained)} trained variables.")
        for variable, value in zip(trained, weights, strict=True):
            _load(variable, value, self.sess)


def _load(variable: Any, value: Array, sess: Any) -> None:
    array = np.asarray(value, variable.dtype.base_dtype.as_numpy_dtype)
    if not variable.shape.is_compatible_with(array.shape):
        raise ConfigError(
            f"the variable {variable.name!r} has the shape {variable.shape}; received {array.shape}."
        )
    sess.run(variable.initializer, feed_dict={variable.initializer.inputs[1]: array})


def _seeded(meta_graph: Any, seed: int | None) -> Any:
    """Random operations without a seed of their own draw by the seed, each another number."""
    if seed is None:
        return meta_graph
    number = 0
    for node in meta_graph.graph_def.node:
        if "seed" in node.attr and "seed2" in node.attr and not (node.attr["seed"].i or node.attr["seed2"].i):
            number += 1
            node.attr["seed"].i, node.attr["seed2"].i = seed + 1, number
    return meta_graph
