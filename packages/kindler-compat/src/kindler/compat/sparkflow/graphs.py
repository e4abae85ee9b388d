"""TensorFlow 1 on TensorFlow 2, and graphs that are text: opened in a session, with their variables.

TensorFlow 2 has most of TensorFlow 1 as `tensorflow.compat.v1`. What moved to Keras 2 is found in `tf_keras`.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kindler.compat.frameworks.tf_graph.legacy_keras import LegacyModule, restore_legacy_keras
from kindler.errors import ConfigError, MissingExtraError
from kindler.models.kind import require_trust
from kindler.models.safety.saved_model import graph_dangers

Array = np.ndarray[Any, np.dtype[Any]]

_IN_KERAS_2 = {
    "layers": LegacyModule("tf.layers", "tf_keras.api._v1.keras.__internal__.legacy.layers"),
    "keras": LegacyModule("tf.keras", "tf_keras"),
}


class _V1:
    """`tensorflow.compat.v1`, whose `layers` and `keras` work with any version of Keras beside it."""

    def __getattr__(self, name: str) -> Any:
        return _IN_KERAS_2[name] if name in _IN_KERAS_2 else getattr(_compat(), name)


tf: Any = _V1()

_lock = threading.Lock()
_speaking = 0
_before: dict[str, Any] = {}


@contextmanager
def speaking_v1() -> Iterator[None]:
    """Within the block the module `tensorflow` is TensorFlow 1, wherever it is or was imported.

    So `import tensorflow as tf` can stay in a program written for TensorFlow 1, at its top, in a function,
    and in other modules.
    """
    global _speaking
    module = importlib.import_module("tensorflow")
    with _lock:
        if not _speaking:
            _put_v1_in_place(module)
        _speaking += 1
    try:
        yield
    finally:
        with _lock:
            _speaking -= 1
            if not _speaking:
                _put_v2_back(module)


def _put_v1_in_place(module: types.ModuleType) -> None:
    restore_legacy_keras()
    if importlib.util.find_spec("tf_keras") is not None:
        importlib.import_module("tf_keras")  # which must not find TensorFlow 1 there when it is first used
    for name in _names():
        if name in vars(module):
            _before[name] = vars(module)[name]
        setattr(module, name, getattr(tf, name))


def _put_v2_back(module: types.ModuleType) -> None:
    for name in _names():
        if name in _before:
            setattr(module, name, _before[name])
        else:
            delattr(module, name)
    _before.clear()


def _names() -> set[str]:
    return {name for name in dir(_compat()) if not name.startswith("_")} - {"compat"}


def _compat() -> Any:
    try:
        return importlib.import_module("tensorflow.compat.v1")
    except ModuleNotFoundError as exc:
        raise MissingExtraError(
            what="kindler.compat.sparkflow", package="tensorflow", extra="tensorflow"
        ) from exc


def json_format() -> Any:
    return importlib.import_module("google.protobuf.json_format")


def meta_graph_of(text: str) -> Any:
    if not text:
        raise ConfigError("there is no graph; build_graph(function) of graph_utils creates one.")
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
