"""What a user hands in for a graph, as one value that travels to the workers.

On the driver it holds the user's own graph and session. What travels is the part of the graph that is
needed, with the values that its variables have in the session at that moment.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from kindler.collective import Array
from kindler.compat.frameworks import loads
from kindler.compat.frameworks.tf_graph.ends import Ends, VariableEnds
from kindler.compat.frameworks.tf_graph.randomness import make_stateless, reseed
from kindler.compat.frameworks.tf_graph.reach import needed
from kindler.compat.frameworks.tf_graph.variables import Values
from kindler.errors import ConfigError
from kindler.frameworks.pickling import pickle_for_workers

_HOST_CODE = ("PyFunc", "EagerPyFunc", "PyFuncStateless")


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """A graph, its session, and what of it is trained and fetched.

    Attributes:
        graph: The user's graph.
        sess: The user's session, whose values training starts from, and which gets the trained ones.
        ends: What is fed and fetched.
        optimizer: What the optimizer is called.
        clip_norm: What gradients are clipped to, for records of a run.
        clip_value: The same.
        config: What functions that make data are called with.
        session_config: A `tf.ConfigProto` for the sessions of workers.
    """

    graph: Any
    sess: Any
    ends: Ends
    optimizer: str = ""
    clip_norm: float | None = None
    clip_value: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    session_config: Any = None


@dataclass(frozen=True, kw_only=True)
class PackedGraph:
    """A spec that travels.

    Attributes:
        graph_def: The part of the graph that is needed.
        ends: What is fed and fetched.
        values: The variables' values, as `numpy.savez` writes them, in the order of `ends.variables`.
        session_config: A `tf.ConfigProto` as bytes.
        rest: The other fields of the spec.
    """

    graph_def: bytes
    ends: Ends
    values: bytes
    session_config: bytes
    rest: Mapping[str, Any]


def dumps(spec: GraphSpec) -> bytes:
    """The spec as bytes, with the values that the session holds now.

    Raises:
        ConfigError: A variable has no value, or the graph calls Python code, which stays here.
    """
    values = Values(spec.sess, spec.ends.variables).read()
    file = io.BytesIO()
    np.savez(file, *[_storable(value) for value in values], allow_pickle=False)
    ends, graph_def = needed_graph(spec.graph, spec.ends)
    ends = replace(ends, draws=make_stateless(graph_def))
    packed = PackedGraph(
        graph_def=graph_def.SerializeToString(),
        ends=ends,
        values=file.getvalue(),
        session_config=b"" if spec.session_config is None else spec.session_config.SerializeToString(),
        rest={
            "optimizer": spec.optimizer,
            "clip_norm": spec.clip_norm,
            "clip_value": spec.clip_value,
            "config": dict(spec.config),
        },
    )
    return pickle_for_workers(packed)


def unpacked(data: bytes) -> PackedGraph:
    """What `dumps` packed."""
    packed: PackedGraph = loads(data)
    return packed


def opened(packed: PackedGraph, config: Any = None, *, seed: int = 0, rank: int = 0) -> GraphSpec:
    """A graph and a session of its own, with the values that travelled.

    Args:
        packed: The graph.
        config: A `tf.ConfigProto`; None takes the user's.
        seed: What random operations draw depends on it.
        rank: The same.
    """
    graph, graph_def = tf.Graph(), tf.GraphDef.FromString(packed.graph_def)
    reseed(graph_def, seed, rank)
    with graph.as_default():
        tf.import_graph_def(graph_def, name="")
    own = tf.ConfigProto.FromString(packed.session_config) if packed.session_config else None
    sess = tf.Session(graph=graph, config=own if config is None else config)
    ends = packed.ends
    with np.load(io.BytesIO(packed.values), allow_pickle=False) as file:
        arrays = [file[name] for name in file.files]
    named = {v.name: _as_stored(a, v) for v, a in zip(ends.variables, arrays, strict=True)}
    Values(sess, ends.variables).assign(named)
    if ends.start:
        sess.run([graph.get_operation_by_name(name) for name in ends.start])
    return GraphSpec(graph=graph, sess=sess, ends=ends, session_config=own, **packed.rest)


def _storable(value: Array) -> Array:
    """Types that numpy's format does not know, such as bfloat16, go as their bytes."""
    return value if value.dtype.kind in "biufc" else np.frombuffer(value.tobytes(), np.uint8)


def _as_stored(array: Array, variable: VariableEnds) -> Array:
    dtype = np.dtype(variable.dtype)
    return array if dtype.kind in "biufc" else np.frombuffer(array.tobytes(), dtype).reshape(variable.shape)


def fetched(ends: Ends) -> list[str]:
    """Names of everything that is ever run or fetched, tensors and operations."""
    names = [port.tensor for port in (*ends.inputs, *ends.labels, *ends.outputs, *ends.metrics)]
    names += [part for metric in ends.streamed for part in (metric.value, metric.update)]
    names += [tensor for tensor, _, _ in ends.values]
    names += [name for variable in ends.variables for name in (variable.read, variable.assign)]
    names += [ends.loss, ends.draws, *ends.start]
    if (training := ends.training) is not None:
        names += [name for part in training.parameters for name in (part.gradient, part.indices)]
        names += [*training.apply, *training.updates, training.rate, training.epoch]
    return [name for name in dict.fromkeys(names) if name]


def needed_graph(graph: Any, ends: Ends) -> tuple[Ends, Any]:
    """The part of a graph that is needed, without devices, and with placeholders for first values."""
    names = fetched(ends)
    _refuse_host_code(graph, names, ends)
    whole = graph.as_graph_def(add_shapes=True)
    nodes = {node.name: node for node in whole.node}
    variables = []
    for number, variable in enumerate(ends.variables):
        if nodes[variable.value.partition(":")[0]].op != "Placeholder":  # in a graph that travelled it is one
            value = _placeholder(whole, f"kindler/value_{number}", nodes[variable.assign], variable)
            variable = replace(variable, value=value)
        variables.append(variable)
    for name, control in ends.training.ties if ends.training is not None else ():
        kept = [item for item in nodes[name].input if item != f"^{control}"]
        del nodes[name].input[:]
        nodes[name].input.extend(kept)
    for node in (*whole.node, *(node for function in whole.library.function for node in function.node_def)):
        node.device = ""
    return replace(ends, variables=tuple(variables)), _part(whole, {name.partition(":")[0] for name in names})


def _part(whole: Any, names: set[str]) -> Any:
    """The nodes of these names, and all that they need."""
    nodes = {node.name: node for node in whole.node}
    kept: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in kept:
            kept.add(name)
            waiting.extend(item.lstrip("^").partition(":")[0] for item in nodes[name].input)
    part = tf.GraphDef(versions=whole.versions, library=whole.library)
    part.node.extend(node for node in whole.node if node.name in kept)
    return part


def _placeholder(graph_def: Any, name: str, assign: Any, variable: VariableEnds) -> str:
    """Let an assignment take its value from a placeholder, so that what made it need not travel."""
    node = graph_def.node.add()
    node.name, node.op = name, "Placeholder"
    node.attr["dtype"].type = tf.as_dtype(np.dtype(variable.dtype)).as_datatype_enum
    shape = tf.TensorShape(variable.shape) if variable.shape is not None else tf.TensorShape(None)
    node.attr["shape"].shape.CopyFrom(shape.as_proto())
    assign.input[1] = name
    return f"{name}:0"


def _refuse_host_code(graph: Any, names: Sequence[str], ends: Ends) -> None:
    targets = [graph.as_graph_element(name) for name in names]
    reached = needed(targets, fed=[variable.value for variable in ends.variables])
    for op in reached.values():
        if op.type in _HOST_CODE:
            raise ConfigError(
                f"the graph calls Python code in {op.name!r} ({op.type}, made by tf.py_func, tf.py_function"
                " or tf.numpy_function), which cannot be sent to workers.\n"
                "Hint: do this to the data before it is fed, or write it with TensorFlow's own operations."
            )
