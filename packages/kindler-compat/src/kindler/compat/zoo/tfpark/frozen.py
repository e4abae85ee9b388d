"""Graphs with their variables turned into constants, as bytes that any process can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from kindler.errors import ConfigError


@dataclass
class FrozenGraph:
    """A graph without variables."""

    graph_def: bytes = field(repr=False)
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    _held: Any = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Without the session, which stays in this process."""
        return {**self.__dict__, "_held": None}

    def run(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        if len(arrays) != len(self.inputs):
            raise ConfigError(
                f"the graph takes {len(self.inputs)} inputs ({self.inputs}); received {len(arrays)}."
            )
        session, graph = self._session()
        tensors = [graph.get_tensor_by_name(name) for name in self.inputs]
        fed = {t.name: np.asarray(a, t.dtype.as_numpy_dtype) for t, a in zip(tensors, arrays, strict=True)}
        return list(session.run(list(self.outputs), fed))

    def gradients(
        self, arrays: Sequence[np.ndarray[Any, Any]], of_outputs: Sequence[np.ndarray[Any, Any]]
    ) -> list[np.ndarray[Any, Any]]:
        """The gradients of the inputs, from those of the outputs; zeros for inputs that have none."""
        session, graph = self._session()
        with graph.as_default():
            inputs = [graph.get_tensor_by_name(name) for name in self.inputs]
            outputs = [graph.get_tensor_by_name(name) for name in self.outputs]
            if not hasattr(graph, "_kindler_gradients"):
                given = [tf.placeholder(output.dtype, output.shape) for output in outputs]
                graph._kindler_gradients = given, tf.gradients(outputs, inputs, given)
            given, found = graph._kindler_gradients
        fed = {**dict(zip(inputs, arrays, strict=True)), **dict(zip(given, of_outputs, strict=True))}
        known = [gradient for gradient in found if gradient is not None]
        values = iter(session.run(known, fed))
        return [np.zeros_like(a) if g is None else next(values) for g, a in zip(found, arrays, strict=True)]

    def _session(self) -> tuple[Any, Any]:
        if self._held is None:
            graph = load(self.graph_def)
            self._held = tf.Session(graph=graph), graph
        session, graph = self._held
        return session, graph


def freeze(sess: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> FrozenGraph:
    """The part of a session's graph between these tensors, with the values that its variables have now."""
    names = [tensor.op.name for tensor in outputs]
    with sess.graph.as_default():
        try:
            constant = tf.graph_util.convert_variables_to_constants(
                sess, sess.graph.as_graph_def(add_shapes=True), names
            )
        except tf.errors.FailedPreconditionError as exc:
            raise ConfigError(
                f"a variable of the graph has no value in this session: {exc.message}\n"
                "Hint: sess.run(tf.global_variables_initializer()), or restore a checkpoint."
            ) from exc
    for node in constant.node:
        node.device = ""
    if constant.library.function:
        constant = _inlined(constant, sorted({tensor.op.name for tensor in (*inputs, *outputs)}))
    return FrozenGraph(
        constant.SerializeToString(),
        tuple(tensor.name for tensor in inputs),
        tuple(tensor.name for tensor in outputs),
    )


def _inlined(graph_def: Any, kept: Sequence[str]) -> Any:
    """The graph with the bodies of functions in the place of calls, so that it fits into other graphs.

    SavedModels of TensorFlow 2 consist of functions.
    """
    from tensorflow.python.grappler import tf_optimizer

    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(graph_def, name="")
    meta = tf.train.export_meta_graph(graph_def=graph_def, graph=graph)
    meta.collection_def["train_op"].node_list.value.extend(kept)  # what the optimizer must not remove
    config = tf.ConfigProto()
    rewriting = config.graph_options.rewrite_options
    rewriting.min_graph_nodes = -1
    rewriting.optimizers.append("function")
    inlined = tf_optimizer.OptimizeGraph(config, meta)
    return tf.graph_util.extract_sub_graph(inlined, list(kept))


def load(graph_def: bytes) -> Any:
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(tf.GraphDef.FromString(graph_def), name="")
    return graph


def element_wise(frozen: FrozenGraph, metas: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Placeholders and outputs, in the default graph, of a graph that takes one element at a time."""
    graph_def = tf.GraphDef.FromString(frozen.graph_def)
    fed = [tf.placeholder(meta.dtype, [None, *meta.shape]) for meta in metas]
    graph = load(frozen.graph_def)
    dtypes = [graph.get_tensor_by_name(name).dtype for name in frozen.outputs]
    single = {name for name, meta in zip(frozen.inputs, metas, strict=True)
              if graph.get_tensor_by_name(name).shape.rank == len(meta.shape)}  # fmt: skip

    def one(row: Any) -> list[Any]:
        parts = zip(frozen.inputs, row, strict=True)
        given = {name: part if name in single else part[None] for name, part in parts}
        return list(
            tf.import_graph_def(graph_def, input_map=given, return_elements=list(frozen.outputs), name="")
        )

    return fed, list(tf.map_fn(one, fed, dtype=dtypes))
