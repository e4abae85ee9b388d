"""The ends of a graph: what is fed and fetched, as names, so that they mean the same in every process.

With it: what a tensor depends on, the values of variables in a session, and which session that is. Nothing
of it adds to a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from kindler.collective import Array
from kindler.errors import ConfigError
from kindler.frameworks.devices import missing_gpu, quiet_without_gpu


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor that is fed or fetched."""

    name: str  # what users call it: the key of a dict, or "" where they gave none
    tensor: str  # its name in the graph, such as "images:0"


@dataclass(frozen=True, slots=True)
class VariableEnds:
    """How a variable is read and written without adding anything to its graph."""

    name: str  # such as "dense/kernel:0"
    read: str  # the tensor that holds its value
    assign: str  # the operation that assigns its first value
    value: str  # the tensor that this operation takes; feeding it assigns any value
    dtype: str  # as numpy calls it
    shape: tuple[int, ...] | None  # None where it is not known
    trainable: bool  # whether optimizers change it


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trained variable and its gradient."""

    variable: str
    gradient: str  # the tensor that is fetched, and fed with what all ranks agreed on
    indices: str = ""  # for a gradient of some rows only (of an embedding): the tensor that numbers them


@dataclass(frozen=True, slots=True)
class Training:
    """What a step consists of."""

    parameters: tuple[Parameter, ...]
    apply: tuple[str, ...]  # operations that apply the gradients
    updates: tuple[str, ...] = ()  # operations that run with every computation of gradients, as BatchNorm's
    rate: str = ""  # the tensor of the learning rate; "" where it is not known
    epoch: str = ""  # a placeholder for the number of the epoch, which a rate depends on; "" for none
    # Pairs of operations of which the first waits for the second; workers leave this out, for the second is
    # one of `updates`.
    ties: tuple[tuple[str, str], ...] = ()

    @property
    def fed(self) -> list[str]:
        """The gradients, then the indices of those that have some."""
        return [p.gradient for p in self.parameters] + [p.indices for p in self.parameters if p.indices]


@dataclass(frozen=True, slots=True)
class Streamed:
    """A metric of `tf.metrics`, which counts in variables of its own."""

    name: str
    value: str  # the tensor of its result
    update: str  # the operation or tensor that counts a batch
    variables: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Ends:
    """All of them."""

    inputs: tuple[Port, ...]  # what features are fed to
    labels: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()  # what `predict` fetches
    named_inputs: bool = False  # whether they have names of the user's, which columns may have, too
    named_labels: bool = False
    named_outputs: bool = False
    loss: str = ""  # a scalar; "" for none
    metrics: tuple[Port, ...] = ()  # means over the rows of a batch
    streamed: tuple[Streamed, ...] = ()
    values: tuple[tuple[str, Any, Any], ...] = ()  # tensors with a constant for training and one otherwise
    training: Training | None = None  # None for a graph that is not trained
    variables: tuple[VariableEnds, ...] = ()  # every variable
    model: frozenset[str] = frozenset()  # what outputs, loss and updates need; others are the optimizer's
    start: tuple[str, ...] = ()  # operations that run once in a new session, such as those that fill tables
    draws: str = ""  # what random operations draw from; "" where there are none, and in the user's graph

    @property
    def rows(self) -> list[str]:
        """What the rows of a batch are fed to."""
        return [port.tensor for port in (*self.inputs, *self.labels)]

    @property
    def constants(self) -> list[str]:
        return [tensor for tensor, _, _ in self.values]


def ports_of(structure: Any, what: str) -> tuple[Port, ...]:
    ports = tuple(Port(name, str(tensor.name)) for name, tensor in _leaves(structure, "", what))
    names = [port.tensor for port in ports]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice and what != "outputs":
        raise ConfigError(f"{what}: {', '.join(twice)} is passed more than once.")
    return ports


def tensors_of(structure: Any, what: str) -> list[Any]:
    return [tensor for _, tensor in _leaves(structure, "", what)]


def _leaves(structure: Any, name: str, what: str) -> Iterator[tuple[str, Any]]:
    if structure is None:
        return
    if isinstance(structure, Mapping):
        for key, part in structure.items():
            yield from _leaves(part, f"{name}_{key}" if name else str(key), what)
    elif isinstance(structure, list | tuple):
        for number, part in enumerate(structure):
            yield from _leaves(part, f"{name}_{number}" if name else "", what)
    else:
        yield name, _tensor(structure, what)


def _tensor(item: Any, what: str) -> Any:
    if isinstance(item, tf.Variable):
        item = item._as_graph_element()
    if isinstance(item, tf.SparseTensor):
        raise ConfigError(
            f"{what}: {item} is a SparseTensor; columns of data are dense.\n"
            "Hint: feed dense columns, and create the sparse tensor from them in the graph."
        )
    if not isinstance(item, tf.Tensor) or not hasattr(item, "op"):
        raise ConfigError(
            f"{what} must be tensors of a TensorFlow graph; received {type(item).__qualname__}.\n"
            "Hint: create them within `with tf.Graph().as_default():`, or call "
            "tf.disable_eager_execution() at"
            " the start of the program, where tf is tensorflow.compat.v1."
        )
    return item


PLACEHOLDERS = ("Placeholder", "PlaceholderV2")
VARIABLES = ("VarHandleOp", "VariableV2", "Variable")


def walk(starts: Iterable[Any], follow: Callable[[Any], Iterable[Any]]) -> dict[str, Any]:
    """All operations or nodes that one comes to from these, by name."""
    known: dict[str, Any] = {}
    waiting = list(starts)
    while waiting:
        item = waiting.pop()
        if item.name not in known:
            known[item.name] = item
            waiting.extend(follow(item))
    return known


def needed(targets: Iterable[Any], *, fed: Collection[str] = ()) -> dict[str, Any]:
    """Every operation that must run to get the targets, by name, the targets' own included."""
    fed = frozenset(fed)
    return walk(
        [op_of(target) for target in targets if getattr(target, "name", "") not in fed],
        lambda op: [*(tensor.op for tensor in op.inputs if tensor.name not in fed), *op.control_inputs],
    )


def op_of(target: Any) -> Any:
    """The operation of a tensor; an operation itself."""
    return getattr(target, "op", target)


_COLLECTIONS = ("variables", "trainable_variables", "local_variables", "model_variables", "metric_variables")


def graph_variables(graph: Any) -> dict[str, Any]:
    """Every variable that the graph's collections know, by the name of its operation."""
    found = [variable for name in _COLLECTIONS for variable in graph.get_collection(name)]
    return {variable.op.name: variable for variable in found if hasattr(variable, "initializer")}


def ends_of(graph: Any, reached: Mapping[str, Any]) -> tuple[VariableEnds, ...]:
    """How to read and write those variables of a graph that are among the operations reached."""
    known = graph_variables(graph)
    trainable = {variable.op.name for variable in graph.get_collection("trainable_variables")}
    names = [op.name for op in reached.values() if op.type in VARIABLES]
    lost = sorted(set(names) - set(known))
    if lost:
        raise ConfigError(
            f"the graph uses the variable {lost[0]!r}, which is in none of its collections, so its value "
            "cannot be sent to workers.\nHint: create variables without collections=[]."
        )
    order = [name for name in known if name in set(names)]
    return tuple(_ends(known[name], trainable=name in trainable) for name in order)


def _ends(variable: Any, *, trainable: bool) -> VariableEnds:
    assign = variable.initializer
    if assign.type not in ("Assign", "AssignVariableOp"):
        raise ConfigError(
            f"the variable {variable.name!r} is initialized by {assign.type} ({assign.name!r}); only plain "
            "assignments of an initial value are supported."
        )
    if variable.dtype.base_dtype == tf.string:
        raise ConfigError(f"the variable {variable.name!r} holds strings, which cannot be trained or saved.")
    shape = variable.shape
    return VariableEnds(
        name=variable.name,
        read=variable.to_proto().snapshot_name,
        assign=assign.name,
        value=assign.inputs[1].name,
        dtype=np.dtype(variable.dtype.base_dtype.as_numpy_dtype).name,
        shape=tuple(shape.as_list()) if shape.is_fully_defined() else None,
        trainable=trainable,
    )


def initialized(sess: Any, variables: Iterable[Any]) -> None:
    """Give those of a graph's variables that have no value yet their first one."""
    missing = [variable for variable in variables if not has_value(sess, variable.to_proto().snapshot_name)]
    # One at a time and again: the first value of one may depend on another.
    while missing:
        left = []
        for variable in missing:
            try:
                sess.run(variable.initializer)
            except tf.errors.FailedPreconditionError:
                left.append(variable)
        if len(left) == len(missing):
            raise ConfigError(f"the variables {[v.name for v in left]} cannot be initialized.")
        missing = left


def has_value(sess: Any, read: str) -> bool:
    try:
        sess.run(read)
    except tf.errors.FailedPreconditionError:
        return False
    return True


class Values:
    """The values of variables in a session."""

    def __init__(self, sess: Any, variables: Sequence[VariableEnds]) -> None:
        self._sess = sess
        self.variables = list(variables)
        self._by_name = {variable.name: variable for variable in variables}

    def read(self, names: Sequence[str] | None = None) -> list[Array]:
        """Copies of the values of these variables, or of all."""
        chosen = self.variables if names is None else [self._by_name[name] for name in names]
        try:
            # Old-style variables are changed in place, under arrays that were fetched.
            return [np.array(value) for value in self._sess.run([variable.read for variable in chosen])]
        except tf.errors.FailedPreconditionError as exc:
            names = [variable.name for variable in chosen if not has_value(self._sess, variable.read)]
            more = f" and {len(names) - 5} more variables" if len(names) > 5 else ""
            raise ConfigError(
                f"the session has no value for {', '.join(names[:5])}{more}.\n"
                "Hint: run tf.global_variables_initializer() in the session, or restore a checkpoint, before"
                " it is used; or pass no sess."
            ) from exc
        except RuntimeError as exc:
            if "closed" not in str(exc):
                raise
            raise ConfigError(
                "the session of this graph is closed.\nHint: keep it open as long as the estimator is used."
            ) from exc

    def assign(self, values: Mapping[str, Array]) -> None:
        """Give variables these values; arrays must not change afterwards, for TensorFlow may keep them."""
        feeds: dict[str, Array] = {}
        ops: list[str] = []
        for name, value in values.items():
            variable = self._by_name[name]
            array = np.asarray(value, np.dtype(variable.dtype))
            if variable.shape is not None and array.shape != variable.shape:
                raise ConfigError(
                    f"the variable {name!r} has the shape {variable.shape} in the graph and {array.shape}"
                    " here; they are not the same model."
                )
            if variable.value in feeds:  # variables that share their first value
                self._sess.run(ops, feeds)
                feeds, ops = {}, []
            feeds[variable.value] = array
            ops.append(variable.assign)
        if ops:
            self._sess.run(ops, feeds)


def session_of(graph: Any, sess: Any, *, known: set[str]) -> Any:
    """The session of a graph's values; what was added to the graph since `known` gets its first value."""
    variables = graph_variables(graph)
    if sess is None:
        current = tf.get_default_session()
        sess = current if current is not None and current.graph is graph else None
    if sess is None:
        sess = tf.Session(graph=graph)
        initialized(sess, variables.values())
        tables = graph.get_collection("table_initializer")
        if tables:
            sess.run(tables)
        return sess
    if getattr(sess, "graph", None) is not graph:
        raise ConfigError(
            "sess belongs to a different graph than the inputs.\n"
            "Hint: tf.Session(graph=inputs.graph) creates one for the same graph."
        )
    initialized(sess, (variable for name, variable in variables.items() if name not in known))
    return sess


def worker_config(given: bytes, *, device: str, local_rank: int, threads: int | None) -> Any:
    """The user's configuration, completed with what the worker was given."""
    config = tf.ConfigProto.FromString(given) if given else tf.ConfigProto(allow_soft_placement=True)
    if threads is not None:
        config.intra_op_parallelism_threads = config.intra_op_parallelism_threads or threads
        config.inter_op_parallelism_threads = config.inter_op_parallelism_threads or threads
    if device == "cpu":
        config.device_count["GPU"] = 0
    elif not config.gpu_options.visible_device_list:
        with quiet_without_gpu():
            gpus = len(tf.config.list_physical_devices("GPU"))
        if not gpus and device.startswith("cuda"):
            raise missing_gpu(device, "TensorFlow", "tensorflow[and-cuda]")
        number = int(device.partition(":")[2]) if ":" in device else local_rank % max(gpus, 1)
        if gpus:
            config.gpu_options.visible_device_list = str(number)
            config.gpu_options.allow_growth = True
    return config
