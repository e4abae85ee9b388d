"""Layers made of layers: containers, graphs, and `Recurrent`, which runs a cell along a sequence.

What a cell does with the inputs of all steps is one multiplication; only what depends on the step before is
computed step by step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kindler.compat.bigdl.arguments import arguments, classes
from kindler.compat.bigdl.nn import functions
from kindler.compat.bigdl.nn.base import Layer, Node, nodes_of
from kindler.compat.bigdl.nn.functions import CAddTable, Identity, axis_of
from kindler.compat.bigdl.nn.weighted import CMul, Linear
from kindler.errors import ConfigError


class Container(Layer):
    """Base class of containers."""

    wraps = False  # whether the layers in it are those that it is made with, rather than added to it

    def add(self, model: Any) -> Any:
        """Append a layer, which may be any torch module; returns the container."""
        if not isinstance(model, nn.Module):
            hint = "\nHint: Model(inputs, outputs) takes nodes." if isinstance(model, Node) else ""
            raise ConfigError(f"add takes a layer; received {model!r}.{hint}")
        self.add_module(str(len(self._modules)), model)
        return self

    @property
    def layers(self) -> list[Any]:
        return list(self._modules.values())

    def flattened_layers(self, include_container: bool = False) -> list[Any]:
        """All layers in it and in the containers among them."""
        flat: list[Any] = []
        for layer in self.layers:
            if isinstance(layer, Container):
                flat += [layer] if include_container else []
                flat += layer.flattened_layers(include_container)
            else:
                flat.append(layer)
        return flat


class Sequential(Container):
    """Layers one after the other."""

    def compute(self, value: Any) -> Any:
        for layer in self._modules.values():
            value = layer(value)  # type: ignore[misc]
        return value


class _Wrapper(Container):
    """A container of the one layer that it is made with."""

    wraps = True

    def setup(self) -> None:
        module = next((vars(self).pop(name) for name in ("module", "model") if name in vars(self)), None)
        if module is not None:
            self.add(module)


def _concat(o: Any, x: Any) -> Any:
    outputs = [layer(x) for layer in o.layers]
    return torch.cat(outputs, axis_of(o.dimension, outputs[0]))


def _parallel_table(o: Any, x: Any) -> Any:
    if not isinstance(x, list) or len(x) != len(o.layers):
        raise ConfigError(
            f"ParallelTable has {len(o.layers)} layers and takes as many inputs; received"
            f" {len(x) if isinstance(x, list) else 'a single tensor'}."
        )
    return [layer(part) for layer, part in zip(o.layers, x, strict=True)]


def _bottle(o: Any, x: Any) -> Any:
    leading = x.shape[: x.dim() - o.n_input_dim + 1]
    output = o.layers[0](x.reshape(-1, *x.shape[len(leading) :]))
    return output.reshape(*leading, *output.shape[1:])


_CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    # Gives its input to every layer, and joins their outputs along an axis; the batch is the first.
    "Concat(dimension)": _concat,
    # Gives its input to every layer; the output is the table of their outputs.
    "ConcatTable": lambda o, x: [layer(x) for layer in o.layers],
    # Gives the i-th of its inputs to the i-th layer.
    "ParallelTable": _parallel_table,
}
_WRAPPERS: dict[str, Callable[[Any, Any], Any]] = {
    # Gives each of its inputs to one layer, with the same weights for all.
    "MapTable(module=None)": lambda o, x: [o.layers[0](part) for part in x],
    # Joins the leading axes for a layer that takes `n_input_dim`, and separates them afterwards.
    "Bottle(module, n_input_dim=2, n_output_dim1=INTMAX)": _bottle,
    # Applies a layer to every step of a sequence: axis 2 of a batch.
    "TimeDistributed(model)": lambda o, x: o.layers[0](x.flatten(0, 1)).unflatten(0, x.shape[:2]),
}
globals().update(classes(__name__, Container, _CONTAINERS, "compute"))
globals().update(classes(__name__, _Wrapper, _WRAPPERS, "compute"))


class _InputLayer(Identity):  # type: ignore[misc]
    """Where data enters a graph."""


def Input(name: str | None = None, bigdl_type: str = "float") -> Node:
    """A node where data enters a graph."""
    layer = _InputLayer()
    if name is not None:
        layer.set_name(name)
    return Node(layer, ())


class Model(
    Container,
    takes=arguments(
        'inputs=None, outputs=None, jvalue=None, bigdl_type="float"',
        'byte_order="little_endian", model_type="bigdl"',
    ),
):
    """A graph of layers.

    Args:
        inputs: The node or nodes where data enters, in the order of the data; or a `Model` that prepares
            what another one, `outputs`, takes. It is frozen: only the other one is trained.
        outputs: The node or nodes whose outputs are returned; or that other `Model`.
        jvalue: Must be None.
        bigdl_type: Without effect, as are the others.
    """

    def setup(self) -> None:
        inputs: Any = vars(self).pop("inputs")
        outputs: Any = vars(self).pop("outputs")
        self._arguments = ((), {})  # the graph is in its steps
        if isinstance(inputs, Model) and isinstance(outputs, Model):
            entries = [Input() for _ in inputs.starts]
            outputs, inputs = outputs(inputs.freeze()(entries)), entries
        starts, ends = nodes_of(inputs), nodes_of(outputs)
        if self.jvalue is not None or not starts or not ends:
            raise ConfigError(
                "Model takes nodes, or lists of them, as inputs and outputs: node = Input(); out ="
                f" Linear(2, 3)(node); Model(node, out). Received {inputs!r} and {outputs!r}."
            )
        order = _in_order(starts, ends)
        place = {id(node): number for number, node in enumerate(order)}
        numbers: dict[int, int] = {}  # a layer that is used twice is one layer
        for node in order:
            if id(node.layer) not in numbers:
                numbers[id(node.layer)] = len(numbers)
                self.add(node.layer)
        self.arrange(
            [(numbers[id(node.layer)], [place[id(b)] for b in node.inputs]) for node in order],
            [place[id(node)] for node in starts],
            [place[id(node)] for node in ends],
        )

    @classmethod
    def unbuilt(cls) -> Any:
        """A model without layers, for `arrange` and `add`."""
        entry = Input()
        model = cls(entry, entry)
        model._modules.clear()
        return model

    def arrange(
        self, steps: Sequence[tuple[int, Sequence[int]]], starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        """Set the order of computation: for each step the number of a layer, and the steps that it takes.

        `starts` are the steps that take the data, `ends` those whose outputs are returned.
        """
        self.steps = [(int(layer), [int(number) for number in before]) for layer, before in steps]
        self.starts, self.ends = [int(number) for number in starts], [int(number) for number in ends]

    def compute(self, value: Any) -> Any:
        inputs = value if isinstance(value, list) else [value]
        if len(inputs) != len(self.starts):
            raise ConfigError(f"the Model has {len(self.starts)} inputs; received {len(inputs)}.")
        fed = dict(zip(self.starts, inputs, strict=True))
        layers = self.layers
        outputs: list[Any] = []
        for number, (layer, before) in enumerate(self.steps):
            parts = [fed[number]] if number in fed else [outputs[step] for step in before]
            outputs.append(layers[layer](parts[0] if len(parts) == 1 else parts))
        ends = [outputs[step] for step in self.ends]
        return ends[0] if len(ends) == 1 else ends

    def node(self, name: str) -> Node:
        for layer in self.layers:
            if isinstance(layer, Layer) and layer.name() == name:
                return Node(layer, ())
        raise ConfigError(f"there is no layer {name!r} in the Model.")

    def set_input_formats(self, input_formats: Sequence[int]) -> Model:
        """Nothing: formats of memory, which the backend of MKL-DNN chose by them, change speed only."""
        return self

    set_output_formats = set_input_formats

    def new_copy(self) -> Model:
        return copy.deepcopy(self)


def _in_order(inputs: Sequence[Node], outputs: Sequence[Node]) -> list[Node]:
    """All nodes between inputs and outputs, each after those whose outputs it takes."""
    order: list[Node] = []
    done: set[int] = set()
    pending: list[tuple[Node, bool]] = [(node, False) for node in reversed(outputs)]
    beginnings = {id(node) for node in inputs}
    while pending:
        node, expanded = pending.pop()
        if id(node) in done:
            continue
        if expanded or id(node) in beginnings:
            done.add(id(node))
            order.append(node)
            continue
        if not node.inputs:
            raise ConfigError(f"{node!r} takes no input, and is not one of the inputs of the Model.")
        pending.append((node, True))
        pending.extend((before, False) for before in reversed(node.inputs))
    unused = [node for node in inputs if id(node) not in done]
    if unused:
        raise ConfigError(f"the input {unused[0]!r} of the Model does not lead to any of its outputs.")
    return order


class Cell(Layer):
    """Base class of cells: one step of a recurrent layer."""

    states = 1

    def project(self, value: Any) -> Any:
        """What the inputs of all steps contribute; `step` gives the output and the new state of a step."""
        return self.of_input(self.dropped(value))

    def initial(self, value: Any) -> list[Any]:
        return [value.new_zeros(value.shape[0], self.hidden_size) for _ in range(self.states)]

    def compute(self, value: Any) -> Any:
        """One step: a table of the input and the state, or the input alone."""
        rows, *state = value if isinstance(value, list) else [value]
        output, after = self.step(self.project(rows), state or self.initial(self.project(rows)))
        return [output, *after]

    def dropped(self, value: Any) -> Any:
        """In training without a share `p` of its elements."""
        return F.dropout(value, self.p, self.training)

    def add_gates(self, of_input: int, of_state: int) -> None:
        """So many times `hidden_size` outputs of the input, with a bias, and of the state, without."""
        size = self.hidden_size
        self.of_input = Linear(self.input_size, of_input * size, True, self.wRegularizer, self.bRegularizer)
        self.of_state = Linear(size, of_state * size, False, self.uRegularizer)

    def set_activation(self, name: str, default: Any) -> None:
        """Make the argument of this name, a layer or BigDL's name of one, a part; None is the default."""
        value = vars(self).pop(name)
        if isinstance(value, str):
            names = {"tanh": "Tanh", "sigmoid": "Sigmoid", "relu": "ReLU", "hard_sigmoid": "HardSigmoid"}
            if value.lower() not in names:
                raise ConfigError(
                    f"the activation must be a layer or one of {sorted(names)}; received {value!r}."
                )
            value = getattr(functions, names[value.lower()])()
        setattr(self, name, default if value is None else value)


_REGULARIZED = "wRegularizer=None, uRegularizer=None, bRegularizer=None"
_SIZES = "input_size, hidden_size, p=0.0, activation=None, inner_activation=None"


class RnnCell(
    Cell,
    takes=arguments(
        "input_size, hidden_size, activation=None, isInputWithBias=True, isHiddenWithBias=True", _REGULARIZED
    ),
):
    """`activation(W x + b + U h + c)`.

    The weights are W (hidden_size, input_size), b, U (hidden_size, hidden_size), c; the default of the
    activation is tanh.
    """

    def setup(self) -> None:
        size, of_bias = self.hidden_size, self.bRegularizer
        self.of_input = Linear(self.input_size, size, self.isInputWithBias, self.wRegularizer, of_bias)
        self.of_state = Linear(size, size, self.isHiddenWithBias, self.uRegularizer, of_bias)
        self.set_activation("activation", torch.tanh)

    def project(self, value: Any) -> Any:
        return self.of_input(value)

    def step(self, projected: Any, state: list[Any]) -> tuple[Any, list[Any]]:
        hidden = self.activation(projected + self.of_state(state[0]))
        return hidden, [hidden]


class LSTM(Cell, takes=arguments(_SIZES, _REGULARIZED)):
    """Long short-term memory.

    The weights are those of the inputs (4 * hidden_size, input_size), their bias, and those of the state
    (4 * hidden_size, hidden_size); the gates are in the order input, candidate, forget, output. `activation`
    is that of candidate and output, tanh; `inner_activation` that of the gates, the sigmoid; `p` is the share
    of inputs and of the state that dropout takes in training.
    """

    states = 2

    def setup(self) -> None:
        self.add_gates(4, 4)
        self.set_activation("activation", torch.tanh)
        self.set_activation("inner_activation", torch.sigmoid)

    def step(self, projected: Any, state: list[Any]) -> tuple[Any, list[Any]]:
        hidden, memory = state
        take, new, keep, show = (projected + self.of_state(self.dropped(hidden))).chunk(4, -1)
        memory = self.inner_activation(take) * self.activation(new) + self.inner_activation(keep) * memory
        hidden = self.inner_activation(show) * self.activation(memory)
        return hidden, [hidden, memory]


class LSTMPeephole(Cell, takes=arguments("input_size=4, hidden_size=3, p=0.0", _REGULARIZED)):
    """An LSTM whose gates see the memory.

    After the weights of an LSTM, whose gates are in the order input, forget, candidate, output here, come a
    number for each element of the memory for the input, forget and output gates.
    """

    states = 2

    def setup(self) -> None:
        self.add_gates(4, 4)
        self.peep_input, self.peep_forget, self.peep_output = (CMul([self.hidden_size]) for _ in range(3))

    def step(self, projected: Any, state: list[Any]) -> tuple[Any, list[Any]]:
        hidden, memory = state
        take, keep, new, show = (projected + self.of_state(self.dropped(hidden))).chunk(4, -1)
        take = torch.sigmoid(take + self.peep_input(memory))
        keep = torch.sigmoid(keep + self.peep_forget(memory))
        memory = take * torch.tanh(new) + keep * memory
        hidden = torch.sigmoid(show + self.peep_output(memory)) * torch.tanh(memory)
        return hidden, [hidden, memory]


class GRU(Cell, takes=arguments(_SIZES, _REGULARIZED)):
    """Gated recurrent unit: `(1 - z) * candidate + z * h`, with the reset gate applied before the product.

    The weights are those of the inputs (3 * hidden_size, input_size) for reset, update and candidate, their
    bias, those of the state for reset and update (2 * hidden_size, hidden_size), and those of the reset
    state for the candidate (hidden_size, hidden_size). The other arguments are those of `LSTM`.
    """

    def setup(self) -> None:
        self.add_gates(3, 2)
        self.of_reset = Linear(self.hidden_size, self.hidden_size, False, self.uRegularizer)
        self.set_activation("activation", torch.tanh)
        self.set_activation("inner_activation", torch.sigmoid)

    def step(self, projected: Any, state: list[Any]) -> tuple[Any, list[Any]]:
        hidden, gates = state[0], 2 * self.hidden_size
        both = self.inner_activation(projected[..., :gates] + self.of_state(self.dropped(hidden)))
        reset, update = both.chunk(2, -1)
        new = projected[..., gates:] + self.of_reset(self.dropped(reset * hidden))
        hidden = (1 - update) * self.activation(new) + update * hidden
        return hidden, [hidden]


class Recurrent(Container):
    """Runs a cell along the steps of sequences (rows, steps, features): `Recurrent().add(LSTM(4, 8))`."""

    def add(self, model: Any) -> Any:
        """Set the cell; returns the container."""
        if not isinstance(model, Cell):
            raise ConfigError(f"Recurrent.add takes a cell, such as LSTM(4, 8); received {model!r}.")
        if self._modules:
            raise ConfigError("Recurrent already has a cell.\nHint: put several Recurrent into a Sequential.")
        return super().add(model)

    def compute(self, value: Any) -> Any:
        return self.run(value)

    def run(self, value: Any, *, backward: bool = False) -> Any:
        """The outputs of all steps, computed from the first or from the last on."""
        if not self._modules:
            raise ConfigError("Recurrent has no cell.\nHint: Recurrent().add(LSTM(4, 8)).")
        (cell,) = self.layers
        projected = cell.project(value)
        state, outputs = cell.initial(projected[:, 0]), []
        steps = projected.unbind(1)
        for step in reversed(steps) if backward else steps:
            output, state = cell.step(step, state)
            outputs.append(output)
        return torch.stack(outputs[::-1] if backward else outputs, 1)


class BiRecurrent(Recurrent, takes=arguments("merge=None")):
    """Runs a cell in both directions, each with its own weights; `merge` takes a table of both, None adds."""

    def setup(self) -> None:
        # Registered as a part only after the cells, so that their weights come first.
        vars(self)["_merge"] = vars(self).pop("merge") or CAddTable()

    def add(self, model: Any) -> Any:
        super().add(model)
        other = Recurrent().add(copy.deepcopy(model))
        other.reset()
        self.add_module("backward_cell", other)
        self.add_module("merge", self._merge)
        return self

    @property
    def layers(self) -> list[Any]:
        return [layer for layer in self._modules.values() if isinstance(layer, Cell)]

    def compute(self, value: Any) -> Any:
        other = self._modules.get("backward_cell")
        if not isinstance(other, Recurrent):
            raise ConfigError("BiRecurrent has no cell.\nHint: BiRecurrent().add(LSTM(4, 8)).")
        return self._merge([self.run(value), other.run(value, backward=True)])


class RecurrentDecoder(Recurrent, takes=arguments("output_length")):
    """Runs a cell `output_length` steps from one input, each step's output being the next one's input."""

    def compute(self, value: Any) -> Any:
        (cell,) = self.layers
        projected, outputs = cell.project(value), []
        state = cell.initial(projected)
        for _ in range(self.output_length):
            output, state = cell.step(projected, state)
            outputs.append(output)
            projected = cell.project(output)
        return torch.stack(outputs, 1)
