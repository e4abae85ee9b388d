"""Modules that are made of PyTorch's own layers alone, described by the layers' arguments.

Such a model needs no class of the user's: it is built again from `torch.nn`. A description counts only if
what it builds looks the same as the original. A layer that is there several times is described once.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from kindler.errors import ConfigError

_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")
_PLAIN = (bool, int, float, str, type(None))
_WHERE = ("device", "dtype")  # arguments that say nothing of the layer
# Layers whose signature does not say what they take.
_RNN = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
_RECURRENT = {"RNN": (*_RNN, "nonlinearity"), "GRU": _RNN, "LSTM": (*_RNN, "proj_size")}


def describe(module: nn.Module) -> dict[str, Any] | None:
    """The layers and their arguments, as JSON has them; None if that is not all there is."""
    layers = _described(module, "", {})
    if layers is None:
        return None
    with torch.device("meta"):
        try:
            again = build(layers)
        except (ConfigError, TypeError, ValueError, RuntimeError):
            return None
    same = repr(again) == repr(module) and all(
        _plain_attributes(one) == _plain_attributes(other)
        for one, other in zip(again.modules(), module.modules(), strict=True)
    )
    return layers if same else None


def build(layers: Mapping[str, Any]) -> nn.Module:
    """The module that a description says; its weights are new."""
    return _built(layers, "", {})


def layer_class(name: str) -> type[nn.Module] | None:
    """The layer of PyTorch's own that `torch.nn` has under this name; None if there is none."""
    cls = getattr(nn, name, None) if name.isidentifier() else None
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        return None
    return cls if cls.__module__.startswith("torch.nn.modules.") else None


def _built(layers: Any, path: str, made: dict[str, nn.Module]) -> nn.Module:
    if not isinstance(layers, Mapping):
        raise ConfigError(f"the stored model is described by {layers!r}, which is not a layer.")
    if "same" in layers:
        if layers["same"] not in made:
            raise ConfigError(f"the stored model repeats the layer {layers['same']!r}, which is not there.")
        return made[layers["same"]]
    name = str(layers.get("layer"))
    cls = layer_class(name)
    if cls is None:
        raise ConfigError(f"the stored model has a layer {name!r}, which torch.nn has not.")
    if name in _CONTAINERS:
        made[path] = holder = cls()
        for key, child in layers["children"]:
            holder.add_module(str(key), _built(child, f"{path}.{key}", made))
        return holder
    given = layers["with"]
    if not isinstance(given, Mapping) or not set(given) <= set(_argument_names(cls)):
        raise ConfigError(f"the stored model has a layer {name!r} with {given!r}, which it does not take.")
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    made[path] = cls(**arguments)
    return made[path]


def _described(module: nn.Module, path: str, seen: dict[int, str]) -> dict[str, Any] | None:
    if id(module) in seen:
        return {"same": seen[id(module)]}
    seen[id(module)] = path
    name = type(module).__name__
    if layer_class(name) is not type(module):
        return None
    inside = module._modules.items()  # with those that are there twice, which `named_children` leaves out
    if name in _CONTAINERS:
        children = [[key, child and _described(child, f"{path}.{key}", seen)] for key, child in inside]
        return {"layer": name, "children": children} if all(child for _, child in children) else None
    return None if inside else {"layer": name, "with": _arguments(module)}


def _arguments(module: nn.Module) -> dict[str, Any]:
    """Layers keep what they were made with under the names of the arguments; `bias` as a tensor or None."""
    found: dict[str, Any] = {}
    for name, default in _argument_names(type(module)).items():
        if not hasattr(module, name):
            continue
        value = getattr(module, name)
        if name in ("bias", "elementwise_affine") and isinstance(default, bool):
            value = value is not None and value is not False
        if _is_plain(value):
            found[name] = value
    return found


def _argument_names(cls: type[nn.Module]) -> dict[str, Any]:
    """What a layer is made with, and the defaults."""
    if cls.__name__ in _RECURRENT:
        return dict.fromkeys(_RECURRENT[cls.__name__])
    parameters = inspect.signature(cls).parameters
    return {name: one.default for name, one in parameters.items() if name not in _WHERE}


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if _is_plain(value) and name != "training" and not name.startswith("_")
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (
        isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value)
    )
