"""PyTorch modules, in inference mode."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kindler.frameworks.torch.outputs import flat, names_of, without_loss
from kindler.models.predictor import Predictor, named
from kindler.models.signature import Array, Arrays, Signature, TensorSpec


class TorchPredictor(Predictor):
    """An `nn.Module`, or the module of an exported program.

    Args:
        model: The model, which is moved.
        device: Where it is to compute.
        inputs_of: The module whose `forward` says what the inputs are, if that is another one.
    """

    def __init__(
        self, model: torch.nn.Module, device: str = "cpu", *, inputs_of: torch.nn.Module | None = None
    ) -> None:
        self._device = torch.device(device)
        self._model = model = model if device == "cpu" else model.to(self._device)
        try:
            model.eval()
        except NotImplementedError:
            pass  # an exported program is as it was exported
        self.steady = all(type(m).__module__.startswith("torch.nn.modules.") for m in model.modules())
        weights = [*model.parameters(), *model.buffers()]
        self.size = sum(w.numel() * w.element_size() for w in weights)
        self._float = next((w.dtype for w in weights if w.is_floating_point()), torch.float32)
        # Where whole numbers are looked up in a table they stay what they are; elsewhere layers want floats.
        self._looks_up = any(
            isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag) for m in model.modules()
        )
        self.signature = Signature(
            _inputs(inputs_of or model, None if self._looks_up else _name(self._float))
        )

    def call(self, inputs: Arrays, method: str) -> Arrays:
        with torch.inference_mode():
            given = [self._tensor(inputs[spec.name]) for spec in self.signature.inputs]
            return named(self._model(*given), convert=_numpy)

    def _tensor(self, array: Array) -> torch.Tensor:
        if not array.flags.writeable:
            array = array.copy()  # PyTorch would warn: it cannot tell that nobody writes to it
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type != "cpu":
            # Its bytes are converted where that is fast; the copy itself need not be waited for.
            tensor = tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._float) if tensor.is_floating_point() else tensor


class NamedTorchPredictor(TorchPredictor):
    """A module that takes its inputs by name.

    Args:
        model: The module.
        inputs: "kwargs" calls `model(name=input)`, "dict" calls `model({name: input})`.
        names: The inputs that requests have; other callers may pass other ones.
        device: Where it is to compute.
    """

    by_name = True

    def __init__(
        self, model: torch.nn.Module, inputs: str, names: Sequence[str], device: str = "cpu"
    ) -> None:
        super().__init__(model, device)
        self._inputs_as = inputs
        self.steady = False
        self.signature = Signature(tuple(TensorSpec(name) for name in names))

    def call(self, inputs: Arrays, method: str) -> Arrays:
        with torch.inference_mode():
            given = {name: self._tensor(array) for name, array in inputs.items()}
            outputs = self._model(**given) if self._inputs_as == "kwargs" else self._model(given)
            outputs = without_loss(outputs)
            tensors = [_numpy(tensor) for tensor in flat(outputs)]
        return named(tensors, names_of(outputs) or ())


def _name(dtype: torch.dtype) -> str | None:
    name = str(dtype).removeprefix("torch.")
    return None if name == "bfloat16" else name


def _inputs(model: torch.nn.Module, dtype: str | None) -> tuple[TensorSpec, ...]:
    taken = [
        p.name
        for p in inspect.signature(model.forward).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    shape = _width(model)
    names = taken or ["input"]
    return tuple(TensorSpec(name, dtype, shape if len(names) == 1 else None) for name in names)


def _width(model: torch.nn.Module) -> tuple[int | None, ...] | None:
    """What a chain of layers begins with, where the first of them says so."""
    first: Any = model
    while isinstance(first, torch.nn.Sequential) and len(first):
        first = first[0]
    first = getattr(first, "base_layer", first)  # of an adapter of peft's
    return (None, first.in_features) if isinstance(first, torch.nn.Linear) else None


def _numpy(value: torch.Tensor) -> Array:
    tensor = value.detach().cpu()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
