"""What a module is besides its layers: numbers in their own precision, which are shared, frozen, or in use.

A module that is built again has single precision, its weights all apart, all of them trained, all parts in
one mode. So that nothing changes in the store, the rest is written down and put back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from kindler.errors import ConfigError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def noted(model: nn.Module) -> dict[str, Any]:
    """What `put_back` must know, as JSON has it."""
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


def kept(model: nn.Module, recipe: Mapping[str, Any]) -> dict[str, torch.Tensor]:
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


def put_back(model: nn.Module, state: Mapping[str, torch.Tensor], recipe: Mapping[str, Any]) -> nn.Module:
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
    put_back_flags(model, recipe)
    return model


def put_back_flags(model: nn.Module, recipe: Mapping[str, Any]) -> None:
    """The modes of its parts, and which weights are frozen, as `noted` returned them."""
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
