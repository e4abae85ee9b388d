"""Containers: layers made of layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kindler.compat.bigdl.nn.axes import axis_of
from kindler.compat.bigdl.nn.base import Layer
from kindler.compat.bigdl.nn.graph import Node, in_order, nodes_of
from kindler.errors import ConfigError

__all__ = [
    "Bottle",
    "Concat",
    "ConcatTable",
    "Container",
    "Identity",
    "Input",
    "MapTable",
    "Model",
    "ParallelTable",
    "Sequential",
    "TimeDistributed",
]


class Container(Layer):
    """Base class of containers.

    Attributes:
        wraps: Whether the layers in it are those that it is made with, rather than added to it.
    """

    wraps = False

    def add(self, model: Any) -> Any:
        """Append a layer; returns the container.

        Args:
            model: A layer, or any torch module.
        """
        if isinstance(model, Node):
            raise ConfigError(
                f"add takes a layer; received {model!r}.\nHint: Model(inputs, outputs) takes nodes."
            )
        if not isinstance(model, nn.Module):
            raise ConfigError(f"add takes a layer; received {model!r}.")
        self.add_module(str(len(self._modules)), model)
        return self

    @property
    def layers(self) -> list[Any]:
        """The layers in it."""
        return list(self._modules.values())

    def flattened_layers(self, include_container: bool = False) -> list[Any]:
        """All layers in it and in the containers among them."""
        found: list[Any] = []
        for layer in self.layers:
            if isinstance(layer, Container):
                found += [layer] if include_container else []
                found += layer.flattened_layers(include_container)
            else:
                found.append(layer)
        return found


class Sequential(Container):
    """Layers one after the other."""

    def compute(self, value: Any) -> Any:
        for layer in self._modules.values():
            value = layer(value)  # type: ignore[misc]
        return value


class Concat(Container):
    """Gives its input to every layer, and joins their outputs along an axis.

    Args:
        dimension: The axis, counted from 1; the batch is the first.
        bigdl_type: Without effect.
    """

    def __init__(self, dimension: int, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.dimension = dimension

    def compute(self, value: Any) -> Any:
        outputs = [layer(value) for layer in self.layers]
        return torch.cat(outputs, axis_of(self.dimension, outputs[0]))


class ConcatTable(Container):
    """Gives its input to every layer; the output is the table of their outputs."""

    def compute(self, value: Any) -> Any:
        return [layer(value) for layer in self.layers]


class ParallelTable(Container):
    """Gives the i-th of its inputs to the i-th layer; the output is the table of their outputs."""

    def compute(self, value: Any) -> Any:
        layers = self.layers
        if not isinstance(value, list) or len(value) != len(layers):
            raise ConfigError(
                f"ParallelTable has {len(layers)} layers and takes as many inputs; received"
                f" {len(value) if isinstance(value, list) else 'a single tensor'}."
            )
        return [layer(part) for layer, part in zip(layers, value, strict=True)]


class MapTable(Container):
    """Gives each of its inputs to one layer, with the same weights for all."""

    wraps = True

    def __init__(self, module: Any = None, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        if module is not None:
            self.add(module)

    def compute(self, value: Any) -> Any:
        (layer,) = self.layers
        return [layer(part) for part in value]


class Bottle(Container):
    """Joins the leading axes of its input for a layer that takes fewer, and separates them afterwards.

    Args:
        module: The layer.
        n_input_dim: Axes of what the layer takes.
        n_output_dim1: Axes of what it returns; the default is the same number.
        bigdl_type: Without effect.
    """

    wraps = True

    def __init__(
        self, module: Any, n_input_dim: int = 2, n_output_dim1: int = 2**31 - 1, bigdl_type: str = "float"
    ) -> None:
        super().__init__(bigdl_type)
        self.n_input_dim = n_input_dim
        self.add(module)

    def compute(self, value: Any) -> Any:
        (layer,) = self.layers
        leading = value.shape[: value.dim() - self.n_input_dim + 1]
        output = layer(value.reshape(-1, *value.shape[len(leading) :]))
        return output.reshape(*leading, *output.shape[1:])


class TimeDistributed(Container):
    """Applies a layer to every step of a sequence: axis 2 of a batch."""

    wraps = True

    def __init__(self, model: Any, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.add(model)

    def compute(self, value: Any) -> Any:
        (layer,) = self.layers
        rows, steps = value.shape[:2]
        output = layer(value.reshape(rows * steps, *value.shape[2:]))
        return output.reshape(rows, steps, *output.shape[1:])


class Identity(Layer):
    """Its input."""

    def compute(self, value: Any) -> Any:
        return value


class _InputLayer(Identity):
    """Where data enters a graph."""


def Input(name: str | None = None, bigdl_type: str = "float") -> Node:
    """A node where data enters a graph."""
    layer = _InputLayer(bigdl_type)
    if name is not None:
        layer.set_name(name)
    return Node(layer, ())


class Model(Container):
    """A graph of layers.

    Args:
        inputs: The node or nodes where data enters, in the order of the data; or a `Model` that prepares
            what another one, `outputs`, takes. It is frozen: only the other one is trained.
        outputs: The node or nodes whose outputs are returned; or that other `Model`.
        jvalue: Must be None.
        bigdl_type: Without effect.
        byte_order: Without effect.
        model_type: Without effect.
    """

    def __init__(
        self,
        inputs: Any = None,
        outputs: Any = None,
        jvalue: Any = None,
        bigdl_type: str = "float",
        byte_order: str = "little_endian",
        model_type: str = "bigdl",
    ) -> None:
        super().__init__(bigdl_type)
        if isinstance(inputs, Model) and isinstance(outputs, Model):
            given = [Input() for _ in inputs.starts]
            inputs, outputs = given, outputs(inputs.freeze()(given))
        starts, ends = nodes_of(inputs), nodes_of(outputs)
        if jvalue is not None or not starts or not ends:
            raise ConfigError(
                "Model takes nodes, or lists of them, as inputs and outputs: node = Input(); out ="
                f" Linear(2, 3)(node); Model(node, out). Received {inputs!r} and {outputs!r}."
            )
        order = in_order(starts, ends)
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
    def unbuilt(cls) -> Model:
        """A model without layers, for `arrange` and `add`."""
        model: Model = cls.__new__(cls)
        Container.__init__(model)
        return model

    def arrange(
        self, steps: Sequence[tuple[int, Sequence[int]]], starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        """Set the order of computation.

        Args:
            steps: For each step the number of a layer, and the steps whose outputs it takes.
            starts: The steps that take the data.
            ends: The steps whose outputs are returned.
        """
        self.steps = [(int(layer), [int(number) for number in before]) for layer, before in steps]
        self.starts, self.ends = [int(number) for number in starts], [int(number) for number in ends]

    def compute(self, value: Any) -> Any:
        given = value if isinstance(value, list) else [value]
        if len(given) != len(self.starts):
            raise ConfigError(f"the Model has {len(self.starts)} inputs; received {len(given)}.")
        fed = dict(zip(self.starts, given, strict=True))
        layers, found = self.layers, []
        for number, (layer, before) in enumerate(self.steps):
            if number in fed:
                found.append(layers[layer](fed[number]))
            else:
                parts = [found[step] for step in before]
                found.append(layers[layer](parts[0] if len(parts) == 1 else parts))
        outputs = [found[step] for step in self.ends]
        return outputs[0] if len(outputs) == 1 else outputs

    def node(self, name: str) -> Node:
        """A node with the layer of this name.

        Raises:
            ConfigError: There is none.
        """
        for layer in self.layers:
            if isinstance(layer, Layer) and layer.name() == name:
                return Node(layer, ())
        raise ConfigError(f"there is no layer {name!r} in the Model.")

    def set_input_formats(self, input_formats: Sequence[int]) -> Model:
        """Nothing: formats of memory, which the backend of MKL-DNN chose by them, change speed only."""
        return self

    set_output_formats = set_input_formats

    def new_copy(self) -> Model:
        """A copy with weights of its own."""
        return copy.deepcopy(self)
