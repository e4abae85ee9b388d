"""Layers in files: their arguments and weights, so that reading one runs no code of the file."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import nn

from kindler.compat.bigdl.nn.regularizers import Regularizer
from kindler.errors import ConfigError
from kindler.files import folder_at, split

_FORMAT = "kindler.bigdl.layer.1"

CLASSES: dict[str, Any] = {}  # layers enter themselves


def write_layer(model: nn.Module, path: str | PathLike[str], *, over_write: bool = True) -> None:
    """Write a layer to a file, completely or not at all.

    Raises:
        ConfigError: The file exists, or there is a layer in it that is not one of `bigdl.nn.layer`.
    """
    folder, name = split(path)
    if not over_write and name in folder_at(folder).names():
        raise ConfigError(f"{path} exists.\nHint: pass over_write=True to replace it.")
    frozen = [key for key, parameter in model.named_parameters() if not parameter.requires_grad]
    state = {key: value.detach().cpu() for key, value in model.state_dict().items()}
    content = {"format": _FORMAT, "layer": _Writer().layer(model), "frozen": frozen, "state": state}
    buffer = io.BytesIO()
    torch.save(content, buffer)
    folder_at(folder).write(name, [buffer.getbuffer()])


def read_layer(path: str | PathLike[str]) -> Any:
    """Read what `write_layer` wrote.

    Raises:
        ConfigError: It is another file.
    """
    folder, name = split(path)
    data = folder_at(folder).read(name)
    try:
        content = torch.load(io.BytesIO(data), weights_only=True)
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as exc:
        raise _strange(path) from exc
    if not isinstance(content, Mapping) or content.get("format") != _FORMAT:
        raise _strange(path)
    model = _Reader().layer(content["layer"])
    model.load_state_dict(content["state"])
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key not in content["frozen"])
    return model


def _strange(path: Any) -> ConfigError:
    return ConfigError(
        f"{path} is not a model that `saveModel` of kindler.compat.bigdl wrote.\n"
        "Hint: files of BigDL itself cannot be read; carry weights over with get_weights and set_weights."
    )


class _Writer:
    """Layers as dicts, lists, strings and numbers."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def layer(self, model: Any) -> dict[str, Any]:
        if id(model) in self._seen:
            return {"same": self._seen[id(model)]}
        kind = type(model).__name__
        if CLASSES.get(kind) is not type(model):
            raise ConfigError(
                f"a {kind} cannot be written: the file has layers of bigdl.nn.layer alone.\n"
                "Hint: torch.save(model, path) writes any module."
            )
        self._seen[id(model)] = len(self._seen)
        if hasattr(model, "arrange"):
            parts: dict[str, Any] = {"steps": model.steps, "starts": model.starts, "ends": model.ends}
        else:
            args, kwargs = model._arguments
            parts = {
                "args": [self.value(value) for value in args],
                "kwargs": {name: self.value(value) for name, value in kwargs.items()},
            }
        if getattr(model, "wraps", True) is False:
            parts["layers"] = [self.layer(part) for part in model.layers]
        return {"class": kind, "name": model._given_name, **parts}

    def value(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):  # initial weights: the weights of now are in the file
            return None
        if isinstance(value, list | tuple):
            return [self.value(part) for part in value]
        if isinstance(value, Regularizer):
            return {"l1": value.l1, "l2": value.l2}
        return self.layer(value)


class _Reader:
    """The layers that a `_Writer` described."""

    def __init__(self) -> None:
        self._layers: list[Any] = []

    def layer(self, facts: Mapping[str, Any]) -> Any:
        if "same" in facts:
            return self._layers[facts["same"]]
        place = len(self._layers)
        self._layers.append(None)
        kind = CLASSES.get(facts["class"])
        if kind is None:
            raise ConfigError(f"the file has a layer {facts['class']!r}, which is not known.")
        if "steps" in facts:
            model = kind.unbuilt()
            model.arrange(facts["steps"], facts["starts"], facts["ends"])
        else:
            args = [self.value(value) for value in facts["args"]]
            model = kind(*args, **{name: self.value(value) for name, value in facts["kwargs"].items()})
        self._layers[place] = model
        for part in facts.get("layers", ()):
            model.add(self.layer(part))
        model._given_name = facts["name"]
        return model

    def value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.value(part) for part in value]
        if isinstance(value, Mapping):
            return Regularizer(value["l1"], value["l2"]) if "l1" in value else self.layer(value)
        return value
