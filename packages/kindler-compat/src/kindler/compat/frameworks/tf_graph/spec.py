"""What a user hands in for a graph, as one value that travels to the workers; `make_spec` checks it.

On the driver it holds the user's own graph and session. What travels is the part of the graph that is
needed, with the values that its variables have in the session at that moment.

Random operations of TensorFlow keep their state in the session, where no checkpoint reaches it. In the graph
that travels they are replaced by stateless ones, which draw from a seed that is fed with each call. Those
within loops draw anew in every turn and stay what they are; they are seeded by rank.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from kindler.collective import Array
from kindler.compat.frameworks.tf_graph.ends import (
    PLACEHOLDERS,
    Ends,
    Port,
    Streamed,
    Training,
    Values,
    VariableEnds,
    ends_of,
    graph_variables,
    needed,
    op_of,
    ports_of,
    session_of,
    tensors_of,
    walk,
)
from kindler.compat.frameworks.tf_graph.training import clip_limits, of_train_op, title, trained_by
from kindler.errors import ConfigError
from kindler.frameworks.pickling import pickle_for_workers

_LEARNING_PHASE = "keras_learning_phase"
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
    kept = walk([nodes[name] for name in names], lambda node: [nodes[_source(n)] for n in node.input])
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
                f"the graph calls Python code in {op.name!r} ({op.type}, created by tf.py_func, "
                f"tf.py_function "
                "or tf.numpy_function), which cannot be sent to workers.\n"
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
            users[_source(item)].append(node)
    enters = [node for node in graph_def.node if node.op in ("Enter", "RefEnter")]
    return set(walk(enters, lambda node: [n for n in users[node.name] if n.op not in ("Exit", "RefExit")]))


def _source(item: str) -> str:
    """The node that an input of another node comes from."""
    return item.lstrip("^").partition(":")[0]


def make_spec(
    *,
    inputs: Any,
    outputs: Any = None,
    labels: Any = None,
    loss: Any = None,
    optimizer: Any = None,
    metrics: Any = None,
    clip_norm: float | None = None,
    clip_value: Any = None,
    updates: Any = None,
    sess: Any = None,
    train_op: Any = None,
    tensor_with_value: Any = None,
    global_step: Any = None,
    session_config: Any = None,
    config: Mapping[str, Any] | None = None,
) -> GraphSpec:
    """A spec of these arguments, which `Estimator.from_graph` explains."""
    graph = _one_graph(inputs, outputs, labels, loss)
    with graph.as_default():
        roles = {"inputs": inputs, "labels": labels, "outputs": outputs}
        ports: dict[str, Any] = {name: ports_of(part, name) for name, part in roles.items()}
        ports |= {f"named_{name}": isinstance(part, Mapping) for name, part in roles.items()}
        _check_rows(graph, [port.tensor for port in (*ports["inputs"], *ports["labels"])])
        _check_training(loss, optimizer, train_op, clip_norm, clip_value)
        means, streamed = _metrics(graph, metrics)
        targets = [t for t in (loss, *tensors_of(outputs, "outputs")) if t is not None]
        values = _values(graph, tensor_with_value, needed(targets))
        name = "" if loss is None else loss.name
        ends = Ends(**ports, loss=name, metrics=means, streamed=streamed, values=values)
        _check_fed(graph, ends)
        known = set(graph_variables(graph))
        training: Training | None = None
        update_ops = _updates(graph, updates, ends) if loss is not None else []
        if train_op is not None:
            own = update_ops if updates is not None else ()
            training = of_train_op(_op(graph, train_op), updates=own)
        elif optimizer is not None:
            judged = [graph.get_tensor_by_name(port.tensor) for port in means]
            clips = {"clip_norm": clip_norm, "clip_value": clip_value}
            training = trained_by(optimizer, loss, update_ops, judged, global_step=global_step, **clips)
        if training is not None:
            _check_step(graph, ends, training)
        ends = _complete(graph, ends, training)
        return GraphSpec(
            graph=graph,
            sess=session_of(graph, sess, known=known),
            ends=ends,
            optimizer="" if optimizer is None else str(title(optimizer)),
            clip_norm=clip_norm,
            clip_value=clip_limits(clip_value),
            config=dict(config or {}),
            session_config=session_config,
        )


def _one_graph(inputs: Any, outputs: Any, labels: Any, loss: Any) -> Any:
    arguments = {"inputs": inputs, "outputs": outputs, "labels": labels, "loss": loss}
    tensors = {name: tensors_of(part, name) for name, part in arguments.items()}
    if not tensors["inputs"]:
        raise ConfigError("inputs must name at least one tensor that features are fed to.")
    graph = tensors["inputs"][0].graph
    for name, parts in tensors.items():
        for tensor in parts:
            if tensor.graph is not graph:
                raise ConfigError(f"{name}: {tensor.name!r} is in another graph than the inputs.")
    return graph


def _check_rows(graph: Any, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{', '.join(twice)} is among the inputs and the labels.")
    for name in names:
        tensor = graph.get_tensor_by_name(name)
        if tensor.shape.rank == 0:
            raise ConfigError(
                f"{name!r} is a scalar; inputs and labels have a row per example, so their shape begins with"
                " None.\nHint: a value that is the same for all rows goes to tensor_with_value."
            )
        if tensor.shape.rank and tensor.shape.as_list()[0] is not None:
            raise ConfigError(
                f"{name!r} has the shape {tuple(tensor.shape.as_list())}, which fixes the number of rows to"
                f" {tensor.shape.as_list()[0]}; batches have any number of rows.\n"
                "Hint: let its shape begin with None."
            )


def _check_training(loss: Any, optimizer: Any, train_op: Any, clip_norm: Any, clip_value: Any) -> None:
    if loss is not None and loss.shape.rank not in (0, None):
        raise ConfigError(
            f"loss must be a scalar, the mean over the rows of a batch; {loss.name!r} has the shape"
            f" {tuple(loss.shape.as_list())}.\nHint: tf.reduce_mean(loss)."
        )
    if optimizer is not None and train_op is not None:
        raise ConfigError("pass either optimizer= or train_op=, which already has an optimizer.")
    if (optimizer is not None or train_op is not None) and loss is None:
        raise ConfigError("an optimizer needs a loss; pass loss=..., a scalar tensor.")
    if clip_norm is not None and (
        not isinstance(clip_norm, int | float) or isinstance(clip_norm, bool) or clip_norm <= 0
    ):
        raise ConfigError(f"clip_norm must be a positive number; received {clip_norm!r}.")
    clip_limits(clip_value)
    if train_op is not None and (clip_norm is not None or clip_value is not None):
        raise ConfigError(
            "a train_op applies gradients as they are; clip them in the graph, or pass optimizer=."
        )


def _metrics(graph: Any, metrics: Any) -> tuple[tuple[Port, ...], tuple[Streamed, ...]]:
    """Those that are means over a batch, and those of `tf.metrics`."""
    if metrics is None:
        return (), ()
    if not isinstance(metrics, Mapping):
        parts = list(metrics) if isinstance(metrics, list | tuple) else [metrics]
        metrics = {tensors_of(part, "metrics")[0].op.name: part for part in parts}
    taken = sorted({"loss", "num_samples"} & set(metrics))
    if taken:
        raise ConfigError(f"metrics: {taken[0]!r} is already a name among the results; rename it.")
    means, streamed = [], []
    for name, metric in metrics.items():
        if isinstance(metric, list | tuple) and len(metric) == 2:
            streamed.append(_streamed(graph, str(name), *metric))
            continue
        [tensor] = tensors_of(metric, "metrics") or [None]
        if tensor is None or tensor.dtype == tf.string:
            raise ConfigError(f"metrics: {name!r} must be a tensor of numbers; received {metric!r}.")
        means.append(Port(str(name), tensor.name))
    return tuple(means), tuple(streamed)


def _streamed(graph: Any, name: str, value: Any, update: Any) -> Streamed:
    reached = needed([value, update])
    kept = [*graph.get_collection("metric_variables"), *graph.get_collection("local_variables")]
    counted = dict.fromkeys(variable.name for variable in kept if variable.op.name in reached)
    return Streamed(name, value.name, op_of(update).name, tuple(counted))


def _values(graph: Any, given: Any, reached: Mapping[str, Any]) -> tuple[tuple[str, Any, Any], ...]:
    """Tensors that are fed with a constant; Keras's own switch between training and judging is one."""
    pairs: Iterable[Any] = given.items() if isinstance(given, Mapping) else given or ()
    found: dict[str, tuple[Any, Any]] = {}
    for tensor, value in pairs:
        [element] = tensors_of(
            graph.as_graph_element(tensor) if isinstance(tensor, str) else tensor, "tensor_with_value"
        )
        two = value if isinstance(value, list | tuple) and len(value) == 2 else (value, value)
        dtype = element.dtype.base_dtype.as_numpy_dtype
        try:
            found[element.name] = (np.asarray(two[0], dtype), np.asarray(two[1], dtype))
        except (TypeError, ValueError) as exc:
            raise ConfigError(
                f"tensor_with_value: {value!r} cannot be fed to {element.name!r}, which takes"
                f" {element.dtype.base_dtype.name}.\nHint: a pair holds the value for training and the one "
                "for evaluate and predict."
            ) from exc
    for op in reached.values():
        if op.type == "PlaceholderWithDefault" and op.name.rpartition("/")[2].startswith(_LEARNING_PHASE):
            dtype = op.outputs[0].dtype.base_dtype.as_numpy_dtype
            found.setdefault(op.outputs[0].name, (np.asarray(True, dtype), np.asarray(False, dtype)))
    return tuple((name, train, other) for name, (train, other) in found.items())


def _check_fed(graph: Any, ends: Ends) -> None:
    """Complain about a loss that no row reaches, and about placeholders that nobody feeds."""
    rows, constants = ends.rows, ends.constants
    if ends.loss:
        reached = needed([graph.get_tensor_by_name(ends.loss)])
        if not any(name.partition(":")[0] in reached for name in rows):
            raise ConfigError(
                f"the loss {ends.loss!r} does not depend on any of the inputs and labels "
                f"({', '.join(rows)}), so it "
                "would not learn from any row.\nHint: compute it from the tensors that are passed as "
                "inputs and"
                " labels."
            )
    judged = [ends.loss, *(port.tensor for port in ends.metrics)]
    judged += [name for metric in ends.streamed for name in (metric.value, metric.update)]
    _refuse_unfed(graph, [name for name in judged if name], [*rows, *constants], "the loss or a metric")
    inputs = [port.tensor for port in ends.inputs]
    outputs = [port.tensor for port in ends.outputs]
    labels = {port.tensor.partition(":")[0] for port in ends.labels}
    for name in outputs:
        needs = labels & set(needed([graph.get_tensor_by_name(name)], fed=[*inputs, *constants]))
        if needs:
            raise ConfigError(
                f"the output {name!r} depends on the labels ({', '.join(sorted(needs))}), which predict does "
                "not have.\n"
                "Hint: outputs are computed from the inputs alone; pass a metric in metrics=."
            )
    _refuse_unfed(graph, outputs, [*inputs, *constants], "an output")


def _check_step(graph: Any, ends: Ends, training: Training) -> None:
    updates, known = [*training.fed, *training.updates], ends.constants
    _refuse_unfed(graph, updates, [*ends.rows, *known], "a gradient or an update")
    if not training.ties:
        _refuse_unfed(graph, training.apply, [*training.fed, *known], "the optimizer (its learning rate?)")


def _refuse_unfed(graph: Any, targets: Sequence[str], fed: Sequence[str], what: str) -> None:
    reached = needed([graph.as_graph_element(name) for name in targets], fed=fed)
    unfed = sorted(op.outputs[0].name for op in reached.values() if op.type in PLACEHOLDERS)
    if unfed:
        raise ConfigError(
            f"{what} needs the placeholder {unfed[0]!r}, which is not fed.\n"
            "Hint: pass it among inputs or labels; or, if all rows share one value, in"
            f" tensor_with_value={{{unfed[0].partition(':')[0]}: (value in training, value otherwise)}}."
        )


def _updates(graph: Any, updates: Any, ends: Ends) -> list[Any]:
    """The operations to run with each step; by default those of the graph's collection that can run."""
    if updates is not None:
        parts = updates if isinstance(updates, list | tuple | set) else [updates]
        return [_op(graph, part) for part in parts]
    ops = [op_of(part) for part in graph.get_collection("update_ops")]
    fed = [*ends.rows, *ends.constants]
    return [op for op in ops if not any(o.type in PLACEHOLDERS for o in needed([op], fed=fed).values())]


def _op(graph: Any, item: Any) -> Any:
    try:
        return op_of(graph.as_graph_element(item, allow_tensor=True, allow_operation=True))
    except (TypeError, ValueError, KeyError) as exc:
        raise ConfigError(f"expected an operation of the graph, received {item!r}: {exc}") from exc


def _complete(graph: Any, ends: Ends, training: Training | None) -> Ends:
    """The ends with the variables that they need, and which of them are the model's."""
    own = [ends.loss, *(port.tensor for port in (*ends.outputs, *ends.metrics))]
    own += [name for metric in ends.streamed for name in (metric.value, metric.update)]
    own += training.updates if training is not None else ()
    model = needed([graph.as_graph_element(name) for name in own if name])
    whole = replace(ends, training=training)
    reached = needed([graph.as_graph_element(name) for name in fetched(whole)])
    tables = graph.get_collection("table_initializer")
    start = [op.name for op in tables if set(needed([op])) & set(reached) - {op.name}]
    variables = ends_of(graph, reached)
    return replace(
        whole,
        variables=variables,
        model=frozenset(v.name for v in variables if v.name.partition(":")[0] in model),
        start=tuple(start),
    )
