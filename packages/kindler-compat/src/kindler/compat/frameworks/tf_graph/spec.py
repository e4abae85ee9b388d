"""What a user hands in for a graph, as one value that travels to the workers.

On the driver it holds the user's own graph and session. What travels is the part of the graph that is
needed, with the values that its variables have in the session at that moment.

Random operations of TensorFlow keep their state in the session, where no checkpoint reaches it. In the graph
that travels they are replaced by stateless ones, which draw from a seed that is fed with each call. Those
within loops draw anew in every turn and stay what they are; they are seeded by rank.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from kindler.collective import Array
from kindler.compat.frameworks.tf_graph.ends import Ends, Values, VariableEnds, needed
from kindler.errors import ConfigError
from kindler.frameworks.pickling import pickle_for_workers

_HOST_CODE = ("PyFunc", "EagerPyFunc", "PyFuncStateless")


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """A graph, its session, and what of it is trained and fetched."""

    graph: Any  # the user's
    sess: Any  # the user's, whose values training starts from, and which gets the trained ones
    ends: Ends
    optimizer: str = ""  # what it is called, for records of a run, as are the next two
    clip_norm: float | None = None
    clip_value: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)  # the argument of functions that make data
    session_config: Any = None  # a `tf.ConfigProto` for the sessions of workers


@dataclass(frozen=True, kw_only=True)
class PackedGraph:
    """A spec that travels."""

    graph_def: bytes  # the part of the graph that is needed
    ends: Ends
    values: bytes  # of the variables, as `numpy.savez` writes them, in the order of `ends.variables`
    session_config: bytes  # a `tf.ConfigProto`
    rest: Mapping[str, Any]  # the other fields of the spec


def packed(spec: GraphSpec) -> PackedGraph:
    """The spec with the values that the session holds now."""
    values = Values(spec.sess, spec.ends.variables).read()
    file = io.BytesIO()
    np.savez(file, *[_storable(value) for value in values], allow_pickle=False)
    ends, graph_def = needed_graph(spec.graph, spec.ends)
    ends = replace(ends, draws=make_stateless(graph_def))
    return PackedGraph(
        graph_def=graph_def.SerializeToString(),
        ends=ends,
        values=file.getvalue(),
        session_config=b"" if spec.session_config is None else spec.session_config.SerializeToString(),
        rest={name: getattr(spec, name) for name in ("optimizer", "clip_norm", "clip_value", "config")},
    )


def dumps(spec: GraphSpec) -> bytes:
    return pickle_for_workers(packed(spec))


def opened(packed: PackedGraph, config: Any = None, *, seed: int = 0, rank: int = 0) -> GraphSpec:
    """A graph and a session of its own, with the values that travelled."""
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
    names = ends.rows + [port.tensor for port in (*ends.outputs, *ends.metrics)]
    names += [part for metric in ends.streamed for part in (metric.value, metric.update)]
    names += ends.constants
    names += [name for variable in ends.variables for name in (variable.read, variable.assign)]
    names += [ends.loss, ends.draws, *ends.start]
    if (training := ends.training) is not None:
        names += [*training.fed, *training.apply, *training.updates, training.rate, training.epoch]
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


DRAWS = "kindler/draws"
_STATELESS = {
    "RandomUniform": "StatelessRandomUniform",
    "RandomStandardNormal": "StatelessRandomNormal",
    "TruncatedNormal": "StatelessTruncatedNormal",
    "RandomUniformInt": "StatelessRandomUniformInt",
    "Multinomial": "StatelessMultinomial",
}
_SEED_AFTER = {"Multinomial": 2}  # inputs before the seed; otherwise it follows the shape
_BITS = 20  # for the numbers of a graph's random operations


def seed_of(*numbers: int) -> int:
    """A number that depends on all of these."""
    words = [number % (1 << 32) for number in numbers]
    return int(np.random.SeedSequence(words).generate_state(2, np.uint64)[0] >> np.uint64(1))


def draw_of(seed: int, count: int) -> Array:
    """What is fed to `DRAWS` for the call of this number."""
    return np.array([seed, count << _BITS], np.int64)


def make_stateless(graph_def: Any) -> str:
    """Replace the random operations of a graph; the tensor to feed, or "" where nothing is drawn."""
    names = {node.name for node in graph_def.node}
    looped = _in_loops(graph_def)
    found = [n for n in graph_def.node if n.op in _STATELESS and n.name not in looped]
    if found and DRAWS not in names:
        _default(graph_def)
    for number, node in enumerate(found):
        _replace(graph_def, node, number)
    return f"{DRAWS}:0" if found or DRAWS in names else ""


def reseed(graph_def: Any, *numbers: int) -> None:
    """Give every operation that still keeps a state of its own a seed that depends on these numbers."""
    bodies = [graph_def.node, *(function.node_def for function in graph_def.library.function)]
    for body, nodes in enumerate(bodies):
        for place, node in enumerate(nodes):
            if "seed" in node.attr and "seed2" in node.attr:
                node.attr["seed"].i = seed_of(*numbers) >> 32
                node.attr["seed2"].i = (body << _BITS) + place + 1


def _default(graph_def: Any) -> None:
    """The tensor that is fed, with a value for whoever does not feed it, as in a SavedModel."""
    zeros = graph_def.node.add(name=f"{DRAWS}/default", op="Const")
    zeros.attr["dtype"].type = tf.int64.as_datatype_enum
    zeros.attr["value"].tensor.CopyFrom(tf.make_tensor_proto([0, 0], tf.int64))
    draws = graph_def.node.add(name=DRAWS, op="PlaceholderWithDefault", input=[zeros.name])
    draws.attr["dtype"].type = tf.int64.as_datatype_enum
    draws.attr["shape"].shape.CopyFrom(tf.TensorShape([2]).as_proto())


def _replace(graph_def: Any, node: Any, number: int) -> None:
    own = graph_def.node.add(name=f"{DRAWS}/number_{number}", op="Const")
    own.attr["dtype"].type = tf.int64.as_datatype_enum
    own.attr["value"].tensor.CopyFrom(tf.make_tensor_proto([0, number], tf.int64))
    seed = graph_def.node.add(name=f"{DRAWS}/seed_{number}", op="AddV2", input=[DRAWS, own.name])
    seed.attr["T"].type = tf.int64.as_datatype_enum
    place = _SEED_AFTER.get(node.op, 1)
    inputs = list(node.input)
    del node.input[:]
    node.input.extend([*inputs[:place], seed.name, *inputs[place:]])
    if node.op == "RandomUniformInt":
        node.attr["dtype"].CopyFrom(node.attr["Tout"])
        del node.attr["Tout"]
    node.attr["Tseed"].type = tf.int64.as_datatype_enum
    for name in ("seed", "seed2"):
        node.attr.pop(name, None)
    node.op = _STATELESS[node.op]


def _in_loops(graph_def: Any) -> set[str]:
    """The nodes within loops: those after an Enter, up to an Exit."""
    users: dict[str, list[Any]] = defaultdict(list)
    for node in graph_def.node:
        for item in node.input:
            users[item.lstrip("^").partition(":")[0]].append(node)
    found: set[str] = set()
    waiting = [node for node in graph_def.node if node.op in ("Enter", "RefEnter")]
    while waiting:
        node = waiting.pop()
        if node.name not in found and node.op not in ("Exit", "RefExit"):
            found.add(node.name)
            waiting.extend(users[node.name])
    return found
