"""The ends of a graph: what is fed and fetched, as names, so that they mean the same in every process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kindler.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor that is fed or fetched.

    Attributes:
        name: What users call it: the key of a dict, or "" where they gave none.
        tensor: Its name in the graph, such as "images:0".
    """

    name: str
    tensor: str


@dataclass(frozen=True, slots=True)
class VariableEnds:
    """How a variable is read and written without adding anything to its graph.

    Attributes:
        name: Its name, such as "dense/kernel:0".
        read: The tensor that holds its value.
        assign: The operation that assigns its first value.
        value: The tensor that this operation takes; feeding it assigns any value.
        dtype: As numpy calls it.
        shape: None where it is not known.
        trainable: Whether optimizers change it.
    """

    name: str
    read: str
    assign: str
    value: str
    dtype: str
    shape: tuple[int, ...] | None
    trainable: bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trained variable and its gradient.

    Attributes:
        variable: The variable's name.
        gradient: The tensor that is fetched, and fed with what all ranks agreed on.
        indices: For a gradient of some rows only (of an embedding): the tensor that numbers them.
    """

    variable: str
    gradient: str
    indices: str = ""


@dataclass(frozen=True, slots=True)
class Training:
    """What a step consists of.

    Attributes:
        parameters: The trained variables.
        apply: Operations that apply the gradients.
        updates: Operations that run with every computation of gradients, such as those of BatchNorm.
        rate: The tensor of the learning rate; "" where it is not known.
        epoch: A placeholder for the number of the epoch, which a learning rate depends on; "" for none.
        ties: Pairs of operations of which the first waits for the second; workers leave this out, for the
            second is one of `updates`.
    """

    parameters: tuple[Parameter, ...]
    apply: tuple[str, ...]
    updates: tuple[str, ...] = ()
    rate: str = ""
    epoch: str = ""
    ties: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Streamed:
    """A metric of `tf.metrics`, which counts in variables of its own.

    Attributes:
        name: What it is called.
        value: The tensor of its result.
        update: The operation or tensor that counts a batch.
        variables: What it counts in.
    """

    name: str
    value: str
    update: str
    variables: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Ends:
    """All of them.

    Attributes:
        inputs: What features are fed to.
        labels: What labels are fed to.
        outputs: What `predict` fetches.
        named_inputs: Whether inputs have names that columns may have, too.
        named_outputs: Whether outputs have names of the user's.
        loss: The loss, a scalar; "" for none.
        metrics: Means over the rows of a batch.
        streamed: Metrics that count in variables.
        values: Tensors that are fed with a constant: one for training, another for everything else.
        training: None for a graph that is not trained.
        variables: Every variable.
        model: Names of the variables that the outputs, the loss and the updates need; others belong to the
            optimizer.
        start: Operations that run once in a new session, such as those that fill tables.
        draws: The tensor that random operations draw from; "" where there are none, and in the user's graph.
    """

    inputs: tuple[Port, ...]
    labels: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    named_inputs: bool = False
    named_labels: bool = False
    named_outputs: bool = False
    loss: str = ""
    metrics: tuple[Port, ...] = ()
    streamed: tuple[Streamed, ...] = ()
    values: tuple[tuple[str, Any, Any], ...] = ()
    training: Training | None = None
    variables: tuple[VariableEnds, ...] = ()
    model: frozenset[str] = field(default_factory=frozenset)
    start: tuple[str, ...] = ()
    draws: str = ""


def ports_of(structure: Any, what: str) -> tuple[tuple[Port, ...], bool]:
    """The tensors of an argument in their order, and whether it names them.

    Args:
        structure: A tensor; or a list, tuple or dict of them, nested if need be. None for none.
        what: The argument's name.

    Raises:
        ConfigError: Something in it is not a tensor of a graph, or is there twice.
    """
    found = list(_leaves(structure, "", what))
    ports = tuple(Port(name, str(tensor.name)) for name, tensor in found)
    names = [port.tensor for port in ports]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice and what != "outputs":
        raise ConfigError(f"{what}: {', '.join(twice)} is given more than once.")
    return ports, isinstance(structure, Mapping)


def tensors_of(structure: Any, what: str) -> list[Any]:
    """The tensors of an argument themselves."""
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
    import tensorflow.compat.v1 as tf

    if isinstance(item, tf.Variable):
        item = item._as_graph_element()
    if isinstance(item, tf.SparseTensor):
        raise ConfigError(
            f"{what}: {item} is a SparseTensor; columns of data are dense.\n"
            "Hint: feed dense columns, and make the sparse tensor of them in the graph."
        )
    if not isinstance(item, tf.Tensor) or not hasattr(item, "op"):
        raise ConfigError(
            f"{what} must be tensors of a TensorFlow graph; received {type(item).__qualname__}.\n"
            "Hint: make them within `with tf.Graph().as_default():`, or call tf.disable_eager_execution() at"
            " the start of the program, where tf is tensorflow.compat.v1."
        )
    return item
