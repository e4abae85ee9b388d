"""What a PyTorch module is besides its numbers, and what trains it, as JSON that is read without trust.

A module of PyTorch's own layers alone needs no class of the user's: it is built again from `torch.nn`. A
description counts only if what it builds looks the same as the original. A layer that is there several times
is described once.

A module that is built again has single precision, its weights all apart, all of them trained, all parts in
one mode. So that nothing changes in the store, the rest is written down and put back.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from kindler.errors import ConfigError
from kindler.estimator.estimator import Estimator
from kindler.estimator.groups import grouped
from kindler.frameworks.torch.spec import TorchSpec

_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")
_PLAIN = (bool, int, float, str, type(None))
_WHERE = ("device", "dtype")  # arguments that say nothing of the layer
# Layers whose signature does not say what they take.
_RNN = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
_RECURRENT = {"RNN": (*_RNN, "nonlinearity"), "GRU": _RNN, "LSTM": (*_RNN, "proj_size")}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NOT_DESCRIBED = ("model", "config", "optimizer", "loss")
_MAKING = ("workers", "engine", "seed", "device")


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
            raise ConfigError(f"the stored model repeats the layer {layers['same']!r}, which is missing.")
        return made[layers["same"]]
    name = str(layers.get("layer"))
    cls = layer_class(name)
    if cls is None:
        raise ConfigError(f"the stored model has a layer {name!r}, which torch.nn does not have.")
    if name in _CONTAINERS:
        made[path] = holder = cls()
        for key, child in layers["children"]:
            holder.add_module(str(key), _built(child, f"{path}.{key}", made))
        return holder
    given = layers["with"]
    if not isinstance(given, Mapping) or not set(given) <= set(_argument_names(cls)):
        raise ConfigError(f"the stored model has a layer {name!r} with {given!r}, which it does not accept.")
    made[path] = cls(**{k: tuple(value) if isinstance(value, list) else value for k, value in given.items()})
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
        if _is_argument(value):
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
        if _is_argument(value) and name != "training" and not name.startswith("_")
    }


def _is_argument(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (
        isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value)
    )


def state_recipe(model: nn.Module) -> dict[str, Any]:
    """What `restore` must know, as JSON has it."""
    parts = model.named_modules()
    hooked = [name or "the model" for name, part in parts if any(getattr(part, hooks) for hooks in _HOOKS)]
    if hooked:
        raise ConfigError(f"{hooked[:5]} have hooks, which are functions and would be lost.")
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in _tensors(model).items():
        by_tensor.setdefault(id(tensor), []).append(name)
    return {
        "training": model.training,
        "ties": sorted(names for names in by_tensor.values() if len(names) > 1),
        "frozen": [name for name, weight in _parameters(model).items() if not weight.requires_grad],
        "modes": [name for name, part in model.named_modules() if part.training != model.training],
    }


def weights_of(model: nn.Module, recipe: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The numbers, on the CPU; those that are shared once."""
    again = {name for names in recipe["ties"] for name in names[1:]}
    state = {name: value for name, value in model.state_dict().items() if name not in again}
    other = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if other:
        raise ConfigError(f"the model's state has {other[:5]}, which are not tensors.")
    places: dict[tuple[Any, ...], str] = {}
    for name, value in state.items():
        place = (value.device, value.data_ptr(), value.numel())
        if value.numel() and value.data_ptr() and place in places:
            raise ConfigError(f"{places[place]!r} and {name!r} are two tensors in the same memory.")
        places[place] = name
    # Copies: what is part of a larger tensor would be stored with all of it, or refused.
    return {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}


def restore(model: nn.Module, state: Mapping[str, torch.Tensor], recipe: Mapping[str, Any]) -> nn.Module:
    """Make a module that was built again what the one was that was stored."""
    ties = recipe.get("ties", ())
    shared = {name: state[names[0]] for names in ties for name in names[1:] if names[0] in state}
    wanted = model.state_dict().keys()
    # Taken over as they are, so that they stay as precise as they were. Versions from before ties were noted
    # rely on their class to tie them, and are copied into its weights.
    model.load_state_dict(
        {**state, **{name: value for name, value in shared.items() if name in wanted}},
        assign="ties" in recipe or recipe.get("form") != "class",
    )
    for first, *others in ties:
        tensor = _tensors(model)[first]
        for name in others:
            holder, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(holder), leaf, tensor)
    restore_flags(model, recipe)
    return model


def restore_flags(model: nn.Module, recipe: Mapping[str, Any]) -> None:
    """The modes of its parts, and which weights are frozen, as `state_recipe` returned them."""
    model.train(bool(recipe["training"]))
    for name in recipe.get("modes", ()):
        model.get_submodule(name).training = not recipe["training"]
    frozen = set(recipe.get("frozen", ()))
    for name, weight in _parameters(model).items():
        weight.requires_grad_(name not in frozen)


def difference(model: nn.Module, again: nn.Module) -> list[str]:
    """Which of its tensors and parts the second does not have as the first has them."""
    one, other = _facts(model), _facts(again)
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _facts(model: nn.Module) -> dict[str, Any]:
    tensors = _tensors(model)
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    facts: dict[str, Any] = {
        name: (tensor.shape, tensor.dtype, tensor.requires_grad, first[id(tensor)])
        for name, tensor in tensors.items()
    }
    return facts | {f"{name}()": part.training for name, part in model.named_modules()}


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**_parameters(model), **dict(model.named_buffers(remove_duplicate=False))}


def describe_training(estimator: Estimator) -> dict[str, Any] | None:
    """The arguments of `Estimator.from_torch` besides the model, as JSON has them; None if there is more.

    Optimizer and loss are classes of PyTorch's own by their names, with plain arguments.
    """
    spec = estimator._model.spec
    if not isinstance(spec, TorchSpec) or estimator._prepare.active:
        return None
    optimizer, loss = _optimizer(spec.optimizer), None
    if isinstance(spec.loss, nn.Module) and not [*spec.loss.parameters(), *spec.loss.buffers()]:
        loss = describe(spec.loss)
    others = {one.name: getattr(spec, one.name) for one in fields(spec) if one.name not in _NOT_DESCRIBED}
    if optimizer is None or loss is None or not all(map(_is_json, others.values())):
        return None
    making = {name: getattr(estimator._run_config, name) for name in _MAKING}
    return {"optimizer": optimizer, "loss": loss, "others": {**others, **making}}


def training_options(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that `describe_training` returned; they may come from anybody."""
    name, keywords = recipe["optimizer"]
    cls = getattr(torch.optim, str(name), None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and _is_json(keywords)):
        raise ConfigError(f"the stage was saved with an optimizer {name!r}, which torch.optim does not have.")
    loss, others = build(recipe["loss"]), dict(recipe["others"])
    known = {one.name for one in fields(TorchSpec)} - {*_NOT_DESCRIBED} | {*_MAKING}
    unknown = sorted(others.keys() - known)
    if unknown or not _is_json(others):
        raise ConfigError(f"the stage was saved with {unknown or others}, which training does not accept.")
    return {"optimizer": functools.partial(cls, **keywords), "loss": loss, **grouped(others)}


def _optimizer(given: Any) -> tuple[str, dict[str, Any]] | None:
    """The name of a class of PyTorch's own and its keywords; None if it is anything else."""
    if isinstance(given, torch.optim.Optimizer):
        (group, *more), taken = given.param_groups, inspect.signature(type(given)).parameters
        settings = {name: group[name] for name in given.defaults if name in taken}
        given = None if more or given.state else functools.partial(type(given), **settings)
    keywords = dict(given.keywords) if isinstance(given, functools.partial) and not given.args else {}
    cls = given.func if isinstance(given, functools.partial) else given
    known = isinstance(cls, type) and getattr(torch.optim, cls.__name__, None) is cls
    return (cls.__name__, keywords) if known and _is_json(keywords) else None


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(inside) for key, inside in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return isinstance(value, _PLAIN) and json.dumps(value) not in ("NaN", "Infinity", "-Infinity")
