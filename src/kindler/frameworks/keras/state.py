"""A Keras model's variables as safetensors: reading them executes nothing."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from kindler.errors import ConfigError
from kindler.frameworks.keras.gradient_hook import optimizers

Array = np.ndarray[Any, np.dtype[Any]]


class ModelVariables:
    """All variables that training changes: the model's own (its seeds included), then its optimizers'."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def own(self) -> list[Any]:
        return _once(getattr(self._model, "variables", ()))

    def all(self) -> list[Any]:
        return _once([*self.own(), *(v for o in optimizers(self._model) for v in _of_optimizer(o))])

    def buffers(self, *, seeds: bool = False) -> list[Any]:
        """Floating point variables, then others."""
        trained = {id(variable) for variable in self._model.trainable_variables}
        known = {id(state) for state in seed_states(self._model)}
        rest = [v for v in self.own() if id(v) not in trained and (seeds or id(v) not in known)]
        return sorted(rest, key=lambda v: "float" not in str(getattr(v.dtype, "name", v.dtype)))

    def read(self) -> list[Array]:
        return [value_of(variable) for variable in self.all()]

    def names(self) -> list[str]:
        return [path_of(variable) for variable in self.all()]

    def assign(
        self, arrays: Sequence[Array], names: Sequence[str] | None = None, *, only_own: bool = False
    ) -> None:
        mine = self.own() if only_own else self.all()
        if len(mine) != len(arrays):
            raise ConfigError(
                f"this state has {len(arrays)} variables, and the model with its optimizer has {len(mine)};"
                " they are not the same model."
            )
        for number, (variable, array) in enumerate(zip(mine, arrays, strict=True)):
            if tuple(variable.shape) != tuple(array.shape):
                name = names[number] if names else number
                raise ConfigError(
                    f"variable {name} has shape {tuple(array.shape)} in this state and"
                    f" {tuple(variable.shape)} in the model; they are not the same model."
                )
            variable.assign(array)


def value_of(variable: Any) -> Array:
    value = getattr(variable, "value", None)
    if value is None or callable(value):  # TensorFlow's own variables
        return np.array(variable.numpy())
    return np.array(importlib.import_module("keras").ops.convert_to_numpy(value))


def path_of(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


def seed_states(model: Any) -> list[Any]:
    """The variables that random layers of Keras 3 draw their seeds from."""
    found = []
    for layer in model._flatten_layers():
        found += [generator.state for generator in getattr(layer, "_seed_generators", ())]
    return _once(found)


def variances(model: Any) -> dict[int, Any]:
    found = {}
    for layer in model._flatten_layers():
        mean, variance = getattr(layer, "moving_mean", None), getattr(layer, "moving_variance", None)
        if mean is not None and variance is not None:
            found[id(variance)] = mean
    return found


def fork_seeds(model: Any, seed: int, epoch: int, rank: int, *place: int) -> None:
    for number, state in enumerate(seed_states(model)):
        state.assign(np.array([seed_of(seed, epoch, rank, number, *place), 0], np.uint32))


def seed_of(seed: int, *place: int) -> int:
    words = np.random.SeedSequence([seed & (2**63 - 1), *place]).generate_state(1, np.uint32)
    return int(words[0] >> 1)


def pack(fields: Mapping[str, Any], arrays: Sequence[Array]) -> bytes:
    named_arrays = {f"{i:05d}": np.ascontiguousarray(_plain(array)) for i, array in enumerate(arrays)}
    kinds = [str(array.dtype) for array in arrays]
    shapes = [list(array.shape) for array in arrays]
    head = json.dumps({**fields, "dtypes": kinds, "shapes": shapes})
    return bytes(save(named_arrays, metadata={"kindler": head}))


def unpack(data: bytes) -> tuple[dict[str, Any], list[Array]]:
    try:
        length = int.from_bytes(data[:8], "little")
        fields = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["kindler"])
        arrays = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"this is not a state of a Keras model: {exc}") from exc
    named = [arrays[f"{i:05d}"] for i in range(len(arrays))]
    shaped = [a.reshape(shape) for a, shape in zip(named, fields["shapes"], strict=True)]
    return fields, shaped


def _plain(array: Array) -> Array:
    """dtypes unknown to numpy (bfloat16) travel as float32, which holds their values."""
    whole = array if array.dtype.kind in "biuf" and array.dtype.isbuiltin else array.astype(np.float32)
    return whole.reshape(-1)


def slots(optimizer: Any) -> list[Any]:
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def _of_optimizer(optimizer: Any) -> list[Any]:
    # Keras 2 does not count the present scale of the loss among them.
    scale = getattr(optimizer, "_loss_scale", None)
    scale_state = [getattr(scale, name, None) for name in ("_current_loss_scale", "_counter")]
    return [*slots(optimizer), *(variable for variable in scale_state if variable is not None)]


def _once(variables: Any) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())
