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
    """Write a layer of `bigdl.nn.layer` to a file, completely or not at all."""
    folder, name = split(path)
    if not over_write and name in folder_at(folder).names():
        raise ConfigError(f"{path} exists.\nHint: pass over_write=True to replace it.")
    frozen = [key for key, parameter in model.named_parameters() if not parameter.requires_grad]
    state = {key: value.detach().cpu() for key, value in model.state_dict().items()}
    content = {"format": _FORMAT, "layer": _described(model, []), "frozen": frozen, "state": state}
    buffer = io.BytesIO()
    torch.save(content, buffer)
    folder_at(folder).write(name, [buffer.getbuffer()])


def read_layer(path: str | PathLike[str]) -> Any:
    """Read what `write_layer` wrote."""
    folder, name = split(path)
    data = folder_at(folder).read(name)
    try:
        content = torch.load(io.BytesIO(data), weights_only=True)
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as exc:
        raise _strange(path) from exc
    if not isinstance(content, Mapping) or content.get("format") != _FORMAT:
        raise _strange(path)
    model = _built(content["layer"], [])
    model.load_state_dict(content["state"])
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key not in content["frozen"])
    return model


def _strange(path: Any) -> ConfigError:
    return ConfigError(
        f"{path} is not a model that `saveModel` of kindler.compat.bigdl wrote.\n"
        "Hint: files of BigDL itself cannot be read; carry weights over with get_weights and set_weights."
    )


def _described(model: Any, seen: list[Any]) -> dict[str, Any]:
    """A layer as dicts, lists, strings and numbers; one that was seen before is its number."""
    for number, other in enumerate(seen):
        if other is model:
            return {"same": number}
    kind = type(model).__name__
    if CLASSES.get(kind) is not type(model):
        raise ConfigError(
            f"a {kind} cannot be written: the file can only hold layers of bigdl.nn.layer.\n"
            "Hint: torch.save(model, path) writes any module."
        )
    seen.append(model)
    if hasattr(model, "arrange"):
        parts: dict[str, Any] = {"steps": model.steps, "starts": model.starts, "ends": model.ends}
    else:
        args, kwargs = model._arguments
        parts = {
            "args": [_plain(value, seen) for value in args],
            "kwargs": {name: _plain(value, seen) for name, value in kwargs.items()},
        }
    if getattr(model, "wraps", True) is False:
        parts["layers"] = [_described(part, seen) for part in model.layers]
    return {"class": kind, "name": model._given_name, **parts}


def _plain(value: Any, seen: list[Any]) -> Any:
    """An argument of a layer; of initial weights nothing, for the weights of now are in the file."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return value.item() if isinstance(value, np.generic) else None
    if isinstance(value, list | tuple):
        return [_plain(part, seen) for part in value]
    if isinstance(value, Regularizer):
        return {"l1": value.l1, "l2": value.l2}
    return _described(value, seen)


def _built(value: Any, seen: list[Any]) -> Any:
    """What `_described` or `_plain` described."""
    if isinstance(value, list):
        return [_built(part, seen) for part in value]
    if not isinstance(value, Mapping):
        return value
    if "l1" in value:
        return Regularizer(value["l1"], value["l2"])
    if "same" in value:
        return seen[value["same"]]
    kind = CLASSES.get(value["class"])
    if kind is None:
        raise ConfigError(f"the file has a layer {value['class']!r}, which is unknown.")
    place = len(seen)
    seen.append(None)
    if "steps" in value:
        model = kind.unbuilt()
        model.arrange(value["steps"], value["starts"], value["ends"])
    else:
        args = _built(value["args"], seen)  # before the others: numbers are in the order of writing
        model = kind(*args, **{name: _built(part, seen) for name, part in value["kwargs"].items()})
    seen[place] = model
    for part in value.get("layers", ()):
        model.add(_built(part, seen))
    model._given_name = value["name"]
    return model
