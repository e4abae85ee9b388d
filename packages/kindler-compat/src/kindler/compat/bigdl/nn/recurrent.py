"""Recurrent layers: cells, and `Recurrent`, which runs one along the steps of a sequence.

What a cell does with the inputs of all steps is one multiplication; only what depends on the step before is
computed step by step.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn import functional as F

from kindler.compat.bigdl.nn.base import Layer
from kindler.compat.bigdl.nn.containers import Container
from kindler.compat.bigdl.nn.linear import CMul, Linear
from kindler.compat.bigdl.nn.tables import CAddTable
from kindler.errors import ConfigError

__all__ = ["GRU", "LSTM", "BiRecurrent", "Cell", "LSTMPeephole", "Recurrent", "RecurrentDecoder", "RnnCell"]


class Cell(Layer):
    """Base class of cells: one step of a recurrent layer."""

    hidden_size: int
    states = 1

    def project(self, value: Any) -> Any:
        """What the inputs of all steps contribute."""
        raise NotImplementedError

    def step(self, projected: Any, state: list[Any]) -> tuple[Any, list[Any]]:
        """The output and the new state of a step."""
        raise NotImplementedError

    def initial(self, value: Any) -> list[Any]:
        """The state before the first step."""
        return [value.new_zeros(value.shape[0], self.hidden_size) for _ in range(self.states)]

    def compute(self, value: Any) -> Any:
        """One step: a table of the input and the state, or the input alone."""
        rows, *state = value if isinstance(value, list) else [value]
        output, after = self.step(self.project(rows), state or self.initial(self.project(rows)))
        return [output, *after]


def _activation(given: Any, default: Any) -> Any:
    """A layer, or BigDL's name of one; None is the default."""
    from kindler.compat.bigdl.nn import activations

    if given is None:
        return default
    if isinstance(given, str):
        names = {"tanh": "Tanh", "sigmoid": "Sigmoid", "relu": "ReLU", "hard_sigmoid": "HardSigmoid"}
        if given.lower() not in names:
            raise ConfigError(f"the activation is a layer or one of {sorted(names)}; received {given!r}.")
        return getattr(activations, names[given.lower()])()
    return given


class RnnCell(Cell):
    """`activation(W x + b + U h + c)`.

    The weights are W (hidden_size, input_size), b, U (hidden_size, hidden_size), c.

    Args:
        input_size: Features of a step.
        hidden_size: Features of the output.
        activation: A layer, such as `Tanh()`.
        isInputWithBias: Whether there is b.
        isHiddenWithBias: Whether there is c.
        wRegularizer: Added to the gradient of W.
        uRegularizer: Added to that of U.
        bRegularizer: Added to those of b and c.
        bigdl_type: Without effect.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        activation: Any = None,
        isInputWithBias: bool = True,
        isHiddenWithBias: bool = True,
        wRegularizer: Any = None,
        uRegularizer: Any = None,
        bRegularizer: Any = None,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.hidden_size = hidden_size
        self.of_input = Linear(input_size, hidden_size, isInputWithBias, wRegularizer, bRegularizer)
        self.of_state = Linear(hidden_size, hidden_size, isHiddenWithBias, uRegularizer, bRegularizer)
        self.activation = _activation(activation, torch.tanh)

    def project(self, value: Any) -> Any:
        return self.of_input(value)

    def step(self, projected: Any, state: list[Any]) -> tuple[Any, list[Any]]:
        hidden = self.activation(projected + self.of_state(state[0]))
        return hidden, [hidden]


class LSTM(Cell):
    """Long short-term memory.

    The weights are those of the inputs (4 * hidden_size, input_size), their bias, and those of the state
    (4 * hidden_size, hidden_size); the gates are in the order input, candidate, forget, output.

    Args:
        input_size: Features of a step.
        hidden_size: Features of the output.
        p: The share of inputs and of the state that dropout takes in training.
        activation: Of candidate and output; None is tanh.
        inner_activation: Of the gates; None is the sigmoid.
        wRegularizer: Added to the gradient of the weights of inputs.
        uRegularizer: Added to that of the weights of the state.
        bRegularizer: Added to that of the bias.
        bigdl_type: Without effect.
    """

    states = 2

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        p: float = 0.0,
        activation: Any = None,
        inner_activation: Any = None,
        wRegularizer: Any = None,
        uRegularizer: Any = None,
        bRegularizer: Any = None,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.hidden_size, self.p = hidden_size, float(p)
        self.of_input = Linear(input_size, 4 * hidden_size, True, wRegularizer, bRegularizer)
        self.of_state = Linear(hidden_size, 4 * hidden_size, False, uRegularizer)
        self.activation = _activation(activation, torch.tanh)
        self.inner_activation = _activation(inner_activation, torch.sigmoid)

    def project(self, value: Any) -> Any:
        return self.of_input(F.dropout(value, self.p, self.training))

    def step(self, projected: Any, state: list[Any]) -> tuple[Any, list[Any]]:
        hidden, memory = state
        gates = projected + self.of_state(F.dropout(hidden, self.p, self.training))
        take, new, keep, show = gates.chunk(4, -1)
        memory = self.inner_activation(take) * self.activation(new) + self.inner_activation(keep) * memory
        hidden = self.inner_activation(show) * self.activation(memory)
        return hidden, [hidden, memory]


class LSTMPeephole(Cell):
    """An LSTM whose gates see the memory.

    The weights are those of the inputs (4 * hidden_size, input_size), their bias, those of the state, and
    one number for each element of the memory for the input, forget and output gates; the gates are in the
    order input, forget, candidate, output.
    """

    states = 2

    def __init__(
        self,
        input_size: int = 4,
        hidden_size: int = 3,
        p: float = 0.0,
        wRegularizer: Any = None,
        uRegularizer: Any = None,
        bRegularizer: Any = None,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.hidden_size, self.p = hidden_size, float(p)
        self.of_input = Linear(input_size, 4 * hidden_size, True, wRegularizer, bRegularizer)
        self.of_state = Linear(hidden_size, 4 * hidden_size, False, uRegularizer)
        self.peep_input, self.peep_forget, self.peep_output = (CMul([hidden_size]) for _ in range(3))

    def project(self, value: Any) -> Any:
        return self.of_input(F.dropout(value, self.p, self.training))

    def step(self, projected: Any, state: list[Any]) -> tuple[Any, list[Any]]:
        hidden, memory = state
        gates = projected + self.of_state(F.dropout(hidden, self.p, self.training))
        take, keep, new, show = gates.chunk(4, -1)
        take = torch.sigmoid(take + self.peep_input(memory))
        keep = torch.sigmoid(keep + self.peep_forget(memory))
        memory = take * torch.tanh(new) + keep * memory
        hidden = torch.sigmoid(show + self.peep_output(memory)) * torch.tanh(memory)
        return hidden, [hidden, memory]


class GRU(Cell):
    """Gated recurrent unit: `(1 - z) * candidate + z * h`, with the reset gate applied before the product.

    The weights are those of the inputs (3 * hidden_size, input_size) for reset, update and candidate, their
    bias, those of the state for reset and update (2 * hidden_size, hidden_size), and those of the reset
    state for the candidate (hidden_size, hidden_size).

    Args:
        input_size: Features of a step.
        hidden_size: Features of the output.
        p: The share of inputs and of the state that dropout takes in training.
        activation: Of the candidate; None is tanh.
        inner_activation: Of the gates; None is the sigmoid.
        wRegularizer: Added to the gradient of the weights of inputs.
        uRegularizer: Added to those of the weights of the state.
        bRegularizer: Added to that of the bias.
        bigdl_type: Without effect.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        p: float = 0.0,
        activation: Any = None,
        inner_activation: Any = None,
        wRegularizer: Any = None,
        uRegularizer: Any = None,
        bRegularizer: Any = None,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(bigdl_type)
        self.hidden_size, self.p = hidden_size, float(p)
        self.of_input = Linear(input_size, 3 * hidden_size, True, wRegularizer, bRegularizer)
        self.of_state = Linear(hidden_size, 2 * hidden_size, False, uRegularizer)
        self.of_reset = Linear(hidden_size, hidden_size, False, uRegularizer)
        self.activation = _activation(activation, torch.tanh)
        self.inner_activation = _activation(inner_activation, torch.sigmoid)

    def project(self, value: Any) -> Any:
        return self.of_input(F.dropout(value, self.p, self.training))

    def step(self, projected: Any, state: list[Any]) -> tuple[Any, list[Any]]:
        hidden = state[0]
        gates = projected[..., : 2 * self.hidden_size] + self.of_state(
            F.dropout(hidden, self.p, self.training)
        )
        reset, update = self.inner_activation(gates).chunk(2, -1)
        new = projected[..., 2 * self.hidden_size :] + self.of_reset(
            F.dropout(reset * hidden, self.p, self.training)
        )
        hidden = (1 - update) * self.activation(new) + update * hidden
        return hidden, [hidden]


class Recurrent(Container):
    """Runs a cell along the steps of sequences (rows, steps, features): `Recurrent().add(LSTM(4, 8))`."""

    def add(self, model: Any) -> Any:
        """Set the cell; returns the container."""
        if not isinstance(model, Cell):
            raise ConfigError(f"Recurrent.add takes a cell, such as LSTM(4, 8); received {model!r}.")
        if self._modules:
            raise ConfigError("Recurrent has a cell already.\nHint: put several Recurrent into a Sequential.")
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


class BiRecurrent(Recurrent):
    """Runs a cell in both directions, each with weights of its own, and merges the outputs.

    Args:
        merge: A layer that takes a table of both; None adds them.
        bigdl_type: Without effect.
    """

    _merge: Any

    def __init__(self, merge: Any = None, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        # Registered as a part only after the cells, so that their weights come first.
        object.__setattr__(self, "_merge", merge or CAddTable())

    def add(self, model: Any) -> Any:
        super().add(model)
        other = Recurrent().add(copy.deepcopy(model))
        other.reset()
        self.add_module("backward_cell", other)
        self.add_module("merge", self._merge)
        return self

    @property
    def layers(self) -> list[Any]:
        """The cell of the forward direction."""
        return [layer for layer in self._modules.values() if isinstance(layer, Cell)]

    def compute(self, value: Any) -> Any:
        other = self._modules.get("backward_cell")
        if not isinstance(other, Recurrent):
            raise ConfigError("BiRecurrent has no cell.\nHint: BiRecurrent().add(LSTM(4, 8)).")
        return self._merge([self.run(value), other.run(value, backward=True)])


class RecurrentDecoder(Recurrent):
    """Runs a cell `output_length` steps from one input, each step's output being the next one's input."""

    def __init__(self, output_length: int, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.output_length = output_length

    def compute(self, value: Any) -> Any:
        (cell,) = self.layers
        projected, outputs = cell.project(value), []
        state = cell.initial(projected)
        for _ in range(self.output_length):
            output, state = cell.step(projected, state)
            outputs.append(output)
            projected = cell.project(output)
        return torch.stack(outputs, 1)
