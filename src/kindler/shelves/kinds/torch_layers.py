"""Modules that are made of PyTorch's own layers alone, described by the layers' arguments.

Such a model needs no class of the user's: it is built again from `torch.nn`. A description counts only if
what it builds looks the same as the original.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from kindler.errors import ConfigError

__all__ = ["build", "describe"]

_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")
_PLAIN = (bool, int, float, str, type(None))


def describe(module: nn.Module) -> dict[str, Any] | None:
    """The layers and their arguments, as JSON has them; None if that is not all there is."""
    told = _described(module)
    if told is None:
        return None
    with torch.device("meta"):
        try:
            again = build(told)
        except (ConfigError, TypeError, ValueError, RuntimeError):
            return None
    return told if repr(again) == repr(module) else None


def build(told: Mapping[str, Any]) -> nn.Module:
    """The module that a description says; its weights are new.

    Raises:
        ConfigError: It names what is no layer of PyTorch's.
    """
    name = str(told["layer"])
    cls = getattr(nn, name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigError(f"the stored model has a layer {name!r}, which torch.nn has not.")
    if name in _CONTAINERS:
        children = [(str(key), build(child)) for key, child in told["children"]]
        if name == "ModuleDict":
            return nn.ModuleDict(dict(children))
        made: nn.Module = nn.ModuleList() if name == "ModuleList" else nn.Sequential()
        for key, child in children:
            made.add_module(key, child)
        return made
    arguments = {
        key: tuple(value) if isinstance(value, list) else value for key, value in told["with"].items()
    }
    return cls(**arguments)


def _described(module: nn.Module) -> dict[str, Any] | None:
    name = type(module).__name__
    if getattr(nn, name, None) is not type(module):
        return None
    if name in _CONTAINERS:
        children = [[key, _described(child)] for key, child in module.named_children()]
        return {"layer": name, "children": children} if all(child for _, child in children) else None
    if any(True for _ in module.children()):
        return None
    return {"layer": name, "with": _arguments(module)}


def _arguments(module: nn.Module) -> dict[str, Any]:
    """Layers keep what they were made with under the names of the arguments; `bias` as a tensor or None."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(module)).parameters.items():
        if name in ("device", "dtype") or not hasattr(module, name):
            continue
        value = getattr(module, name)
        if name in ("bias", "elementwise_affine") and isinstance(parameter.default, bool):
            value = value is not None and value is not False
        if isinstance(value, _PLAIN) or (
            isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value)
        ):
            found[name] = value
    return found
