"""`Layer`: a torch module with the methods that BigDL's layers have.

A layer called with tensors is a torch module. Called with arrays, `forward` returns arrays and remembers what
`backward` needs. Called with nodes, it becomes a node of a graph, see `Model`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from kindler.compat.bigdl.arguments import Configured, arguments
from kindler.compat.bigdl.nn.conversion import are_arrays, gradients_of, leaves, to_arrays, to_tensors
from kindler.compat.bigdl.nn.files import CLASSES, read_layer, write_layer
from kindler.compat.bigdl.nn.initialization_method import InitializationMethod
from kindler.compat.bigdl.nn.regularizers import Regularizer
from kindler.compat.bigdl.nn.samples import evaluated, predicted, predicted_classes
from kindler.compat.bigdl.util.arrays import JTensor, fill_uniform, set_seed, undrawn
from kindler.errors import ConfigError

Array = np.ndarray[Any, Any]

# What `backward` needs of the last `forward` with arrays; not in the layers, which must be picklable.
_TAPES: WeakKeyDictionary[nn.Module, tuple[Any, Any]] = WeakKeyDictionary()


class Node:
    """A layer in a graph, and the nodes whose outputs it takes, in the order in which it takes them."""

    def __init__(self, layer: Any, inputs: Sequence[Node]) -> None:
        self.layer, self.inputs = layer, tuple(inputs)

    def element(self) -> Any:
        return self.layer

    def remove_pre_edges(self) -> Node:
        self.inputs = ()
        return self

    def remove_next_edges(self) -> Node:
        """Nothing: a node does not know who takes its output."""
        return self

    def __repr__(self) -> str:
        return f"Node({self.layer.name()})"


def nodes_of(value: Any) -> tuple[Node, ...]:
    """The nodes of an argument, if it is one or a list of them; empty otherwise."""
    if isinstance(value, Node):
        return (value,)
    if isinstance(value, list | tuple) and value and all(isinstance(part, Node) for part in value):
        return tuple(value)
    return ()


class ParameterTable(Iterator[nn.Parameter]):
    """The parameters of a layer: torch's iterator, and by the name of a layer what BigDL returns.

    `model.parameters()["fc1"]["weight"]` is an array; "gradWeight" and "gradBias" are there as well.
    """

    def __init__(self, layer: nn.Module, parameters: Iterator[nn.Parameter]) -> None:
        self._layer, self._parameters = layer, parameters

    def __next__(self) -> nn.Parameter:
        return next(self._parameters)

    def __getitem__(self, name: str) -> dict[str, Array]:
        return self._table()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._table()

    def __len__(self) -> int:
        return len(self._table())

    def __getattr__(self, name: str) -> Any:
        if name not in ("keys", "values", "items"):
            raise AttributeError(name)
        return getattr(self._table(), name)

    def _table(self) -> dict[str, dict[str, Array]]:
        table: dict[str, dict[str, Array]] = {}
        for module in self._layer.modules():
            own = dict(module.named_parameters(recurse=False))
            if own and isinstance(module, Layer):
                arrays = table[module.name()] = {}
                for name, parameter in own.items():
                    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    arrays[name] = to_arrays(parameter)
                    arrays[f"grad{name[:1].upper()}{name[1:]}"] = to_arrays(gradient)
        return table


class Layer(Configured, nn.Module, takes=arguments()):
    """Base class of BigDL's layers.

    Subclasses define `compute`, which gets a tensor, or a list of tensors where the layer takes a table.
    """

    _given_name: str | None
    _regularizers: dict[str, Regularizer]
    _init_methods: dict[str, InitializationMethod]
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]  # what `files.py` writes

    __repr__ = nn.Module.__repr__  # with the layers inside

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__.startswith(__package__):
            CLASSES[cls.__name__] = cls

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vars(self).update(_given_name=None, _regularizers={}, _init_methods={}, _arguments=(args, kwargs))
        super().__init__(*args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "made_with" in state:  # pickled by a version that kept fewer of the arguments
            made_with = state["made_with"]
            kept = {n: v for n, v in self.attributes(*made_with).items() if n not in state["_modules"]}
            state = {**kept, "_arguments": made_with, **state}
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def compute(self, value: Any) -> Any:
        """The output for a tensor, or for a list of tensors."""
        raise NotImplementedError

    def forward(self, *inputs: Any) -> Any:
        """The output: tensors for tensors, arrays for arrays."""
        value = inputs[0] if len(inputs) == 1 else list(inputs)
        if not are_arrays(value):
            return self.compute(list(value) if isinstance(value, tuple) else value)
        tensors = to_tensors(value, tracked=True)
        with torch.enable_grad():
            output = self(tensors)
        _TAPES[self] = (tensors, output)
        return to_arrays(output)

    def __call__(self, *inputs: Any) -> Any:
        if not inputs:
            return Node(self, ())
        if nodes := nodes_of(inputs[0] if len(inputs) == 1 else inputs):
            return Node(self, nodes)
        return super().__call__(*inputs)

    def backward(self, input: Any, grad_output: Any) -> Any:  # noqa: A002 - BigDL's name
        """The gradient with respect to the input, after `forward`; gradients of parameters are added up.

        What regularizers of layers add to the gradients is added here, once a call.
        """
        if self not in _TAPES:
            self.forward(input)
        tensors, output = _TAPES.pop(self)
        pairs = zip(leaves(output), leaves(to_tensors(grad_output)), strict=True)
        chosen = [(out, grad.reshape(out.shape)) for out, grad in pairs if out.requires_grad]
        torch.autograd.backward([out for out, _ in chosen], [grad for _, grad in chosen])
        for parameter, regularizer in regularized(self):
            if parameter.requires_grad and parameter.grad is not None:
                parameter.grad += regularizer.gradient(parameter.detach())
        return gradients_of(tensors)

    def name(self) -> str:
        """The name that `set_name` gave it, or one of its own."""
        return self._given_name or f"{type(self).__name__}{id(self):x}"

    def set_name(self, name: str) -> Layer:
        self._given_name = name
        return self

    def parameters(self, recurse: bool = True) -> ParameterTable:
        """The parameters, by torch's or by BigDL's rules; see `ParameterTable`."""
        return ParameterTable(self, super().parameters(recurse))

    def get_weights(self) -> list[Array]:
        """The weights of all layers, in their order: of each the weight, then the bias."""
        return [to_arrays(parameter).copy() for parameter in nn.Module.parameters(self)]

    def set_weights(self, weights: Any) -> None:
        """Set the weights: arrays in the order and the shapes of `get_weights`.

        As in BigDL, an array of another shape with as many numbers is taken in their order; that warns.
        """
        several = [weights] if isinstance(weights, np.ndarray | JTensor) else list(weights)
        arrays = [np.asarray(array) for array in several]
        own = list(nn.Module.parameters(self))
        if len(arrays) != len(own):
            raise ConfigError(
                f"set_weights: the layer has {len(own)} arrays of weights; received {len(arrays)}."
            )
        for place, (parameter, array) in enumerate(zip(own, arrays, strict=True)):
            wanted = tuple(parameter.shape)
            text = f"set_weights: array {place} must have the shape {wanted}; received {array.shape}."
            if array.size != parameter.numel():
                raise ConfigError(text)
            if array.shape != wanted:
                warnings.warn(
                    f"{text} Its numbers are used in their order, as BigDL does.\nHint: transpose it if it"
                    " is (inputs, outputs).",
                    stacklevel=2,
                )
        for parameter, array in zip(own, arrays, strict=True):
            parameter.data.copy_(torch.as_tensor(array.reshape(parameter.shape), dtype=parameter.dtype))

    def is_with_weights(self) -> bool:
        return any(True for _ in nn.Module.parameters(self))

    def set_init_method(self, weight_init_method: Any = None, bias_init_method: Any = None) -> Layer:
        """Draw the weight and the bias anew, now and at every `reset`; None leaves what there is."""
        both = {"weight": weight_init_method, "bias": bias_init_method}
        chosen = {name: method for name, method in both.items() if method is not None}
        for name, method in chosen.items():
            if not isinstance(method, InitializationMethod):
                raise ConfigError(
                    f"set_init_method: the method of the {name} must be one of"
                    f" bigdl.nn.initialization_method, such as Xavier(); received {method!r}."
                )
        if chosen and not any(self._parameters.get(name) is not None for name in both):
            raise ConfigError(
                f"set_init_method: {type(self).__name__} does not have a weight or a bias itself.\n"
                "Hint: call it on the layers inside."
            )
        self._init_methods.update(chosen)
        self._fill(chosen)
        return self

    def reset(self) -> Layer:
        """Draw all weights anew, with the methods that `set_init_method` was given."""
        for module in self.modules():
            if isinstance(module, Layer):
                with undrawn() if module._init_methods else nullcontext():  # a method draws instead
                    module.initialize()
                module._fill(module._init_methods)
        return self

    def _fill(self, methods: Mapping[str, InitializationMethod]) -> None:
        for name, method in methods.items():
            if (parameter := self._parameters.get(name)) is not None:
                method.fill(parameter.data)

    def initialize(self) -> None:
        """Draw this layer's own weights."""

    zero_grad_parameters = nn.Module.zero_grad

    def update_parameters(self, learning_rate: float) -> None:
        """A step of gradient descent with the gradients that `backward` has added up."""
        for parameter in nn.Module.parameters(self):
            if parameter.grad is not None:
                parameter.data.sub_(learning_rate * parameter.grad)

    def freeze(self, names: Sequence[str] | str | None = None) -> Layer:
        """Do not train these layers, or all of them; returns the layer."""
        return self._set_trained(names, trained=False)

    def unfreeze(self, names: Sequence[str] | str | None = None) -> Layer:
        """Train these layers again, or all of them."""
        return self._set_trained(names, trained=True)

    def _set_trained(self, names: Sequence[str] | str | None, *, trained: bool) -> Layer:
        wanted = [names] if isinstance(names, str) else names
        known = {module.name(): module for module in self.modules() if isinstance(module, Layer)}
        unknown = sorted(set(wanted or ()) - set(known))
        if unknown:
            raise ConfigError(f"there is no layer {unknown[0]!r}; set_name gives names.")
        for layer in [self] if wanted is None else [known[name] for name in wanted]:
            for parameter in nn.Module.parameters(layer):
                parameter.requires_grad_(trained)
        return self

    def is_training(self) -> bool:
        return self.training

    def evaluate(self, *args: Any) -> Any:
        """Without arguments, switch to evaluation mode; otherwise judge an RDD of `Sample`s.

        Args:
            args: The RDD or an iterable of samples, the rows of a batch, and a list of validation methods.

        Returns:
            The layer, or a list of `EvaluatedResult`.
        """
        return evaluated(self, *args) if args else self.eval()

    def predict(self, features: Any, batch_size: int = -1) -> Any:
        """The outputs for arrays as an array, for an RDD of `Sample`s as an RDD."""
        return predicted(self, features, batch_size)

    def predict_class(self, features: Any, batch_size: int = -1) -> Any:
        """The number of the largest output of each row, counted from 1."""
        return predicted_classes(self, features, batch_size)

    def predict_local(self, X: Any, batch_size: int = -1) -> Any:
        """The same as `predict`, as are the others, but for classes."""
        return predicted(self, X, batch_size)

    def predict_class_local(self, X: Any, batch_size: int = -1) -> Any:
        return predicted_classes(self, X, batch_size)

    def predict_distributed(self, data_rdd: Any, batch_size: int = -1) -> Any:
        return predicted(self, data_rdd, batch_size)

    def predict_class_distributed(self, data_rdd: Any, batch_size: int = -1) -> Any:
        return predicted_classes(self, data_rdd, batch_size)

    def set_seed(self, seed: int = 123) -> Layer:
        """Seed the numbers that layers draw their weights from: the same ones as BigDL's."""
        set_seed(seed)
        return self

    def saveModel(self, modelPath: str, weightPath: str | None = None, over_write: bool = False) -> None:
        """Write the layer, with its weights, to a file; `loadModel` reads it without running code of it."""
        write_layer(self, modelPath, over_write=over_write)

    def save(self, path: str, over_write: bool = False) -> None:
        self.saveModel(path, over_write=over_write)

    @staticmethod
    def loadModel(modelPath: str, weightPath: str | None = None, bigdl_type: str = "float") -> Any:
        """Read a layer that `saveModel` wrote."""
        return read_layer(modelPath)

    load = loadModel

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


# Arguments of layers with weights, by what they are for.
_REGULARIZERS = {
    "weight": ("wRegularizer", "w_regularizer", "weight_regularizer"),
    "bias": ("bRegularizer", "b_regularizer", "bias_regularizer"),
}


class Weighted(Layer):
    """A layer with a weight, a bias, or both, drawn between `1 / sqrt(fan)` and its negative."""

    def shapes(self) -> tuple[Any, Any, float]:
        """The shape of the weight, that of the bias (None is none) and the fan."""
        raise NotImplementedError

    def setup(self) -> None:
        options = vars(self)
        for name, shape in zip(("weight", "bias"), self.shapes(), strict=False):
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.empty(shape)))
        self.initialize()
        for name in ("weight", "bias"):
            self._start_with(name, options.get(f"init_{name}"))
            for regularizer in (options[n] for n in _REGULARIZERS[name] if options.get(n) is not None):
                if not isinstance(regularizer, Regularizer):
                    raise ConfigError(
                        f"{type(self).__name__}: a regularizer must be L1Regularizer, L2Regularizer or"
                        f" L1L2Regularizer of bigdl.optim.optimizer; received {regularizer!r}."
                    )
                self._regularizers[name] = regularizer
        ignored = [name for name in ("init_grad_weight", "init_grad_bias") if options.get(name) is not None]
        if ignored:
            warnings.warn(f"{type(self).__name__}: {', '.join(ignored)} have no effect.", stacklevel=4)

    def initialize(self) -> None:
        bound = 1 / math.sqrt(self.shapes()[2])
        for parameter in self._parameters.values():
            if parameter is not None:
                fill_uniform(parameter.data, -bound, bound)

    def _start_with(self, name: str, array: Any) -> None:
        parameter = getattr(self, name)
        if array is None or parameter is None:
            return
        value = torch.as_tensor(np.asarray(array), dtype=parameter.dtype)
        if value.numel() != parameter.numel():
            raise ConfigError(
                f"{type(self).__name__}: init_{name} must have the shape {tuple(parameter.shape)};"
                f" received {tuple(value.shape)}."
            )
        parameter.data.copy_(value.reshape(parameter.shape))


def regularized(model: nn.Module) -> Iterator[tuple[nn.Parameter, Regularizer]]:
    """All parameters of a model that have a regularizer, with it."""
    for part in model.modules():
        if isinstance(part, Layer):
            for name, regularizer in part._regularizers.items():
                if (parameter := part._parameters.get(name)) is not None:
                    yield parameter, regularizer
