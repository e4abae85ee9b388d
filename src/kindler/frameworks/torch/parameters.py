"""The parameters that training moves and the modules that train, both of which may change meanwhile."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from kindler.collective import Collective, share_bytes
from kindler.errors import ConfigError

_EVERY_WORKER = "callbacks run on every worker; freeze, unfreeze and add parameters on all of them alike."


class Parameters:
    """`held`: the optimizer's parameters and the model's others that get gradients, each once."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._seen: tuple[list[int], list[bool]] = ([], [])
        self._exchanged: set[int] = set()
        self.held: list[nn.Parameter] = []
        self.look()

    def look(self) -> bool:
        """Whether the optimizer's parameters or their `requires_grad` changed since the last call."""
        moved = [p for group in self._optimizer.param_groups for p in group["params"]]
        seen = ([id(p) for p in moved], [p.requires_grad for p in moved])
        if seen == self._seen:
            return False
        self._seen = seen
        trained = (p for p in self._model.parameters() if p.requires_grad)
        self.held = list({id(p): p for p in (*trained, *moved)}.values())
        return True

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.held if p.requires_grad]

    def unexchanged(self) -> list[nn.Parameter]:
        return [p for p in self.held if p.requires_grad and id(p) not in self._exchanged]

    def exchange(self, parameters: Iterable[nn.Parameter]) -> None:
        self._exchanged |= {id(p) for p in parameters}


def agree_on(collective: Collective, parameters: Sequence[nn.Parameter]) -> None:
    """Raises unless all ranks add the same parameters with the same values."""
    kinds = json.dumps([[list(p.shape), str(p.dtype)] for p in parameters])
    told = share_bytes(collective, kinds.encode()).decode()
    if _any(collective, told != kinds):
        raise ConfigError(
            "workers have begun to train different parameters: the first one those of (shape, dtype)"
            f" {told}, this one {kinds}.\nHint: {_EVERY_WORKER}"
        )
    values = b"".join(hashlib.sha256(_bytes(parameter)).digest() for parameter in parameters)
    if _any(collective, share_bytes(collective, values) != values):
        raise ConfigError(
            "a parameter that came in while training ran has other values on one worker than on another.\n"
            "Hint: make it with the same random numbers everywhere: torch.manual_seed(run.epoch) before it."
        )


def _bytes(parameter: nn.Parameter) -> bytes:
    return parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _any(collective: Collective, flag: bool) -> bool:
    return bool(collective.sum([np.array([flag], np.int64)])[0][0])


def unshared_change_error() -> ConfigError:
    return ConfigError(
        "a worker has begun to train further parameters (unfrozen, or added to the optimizer), and others"
        " have"
        f" not.\nHint: {_EVERY_WORKER}"
    )


def trained(modules: Mapping[str, nn.Module]) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in named_parameters(modules).items()}


def recall_trained(flags: Mapping[str, bool], modules: Mapping[str, nn.Module]) -> None:
    for name, parameter in named_parameters(modules).items():
        if flags.get(name, parameter.requires_grad) is not parameter.requires_grad:
            parameter.requires_grad_(flags[name])


def group_names(optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]) -> list[list[str | None]]:
    """None if no module has the parameter."""
    names = {id(parameter): name for name, parameter in named_parameters(modules).items()}
    return [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    groups: Sequence[Sequence[str | None]],
    modules: Mapping[str, nn.Module],
) -> None:
    """Works even if groups were added or layers unfrozen, before or after."""
    named = named_parameters(modules)
    if any(name not in named for group in groups for name in group):  # parameters of nobody: by their order
        _load(optimizer, state)
        return
    built = optimizer.param_groups[:]
    then = {id(named[name]) for group in groups for name in group if name is not None}
    later = [[p for p in group["params"] if id(p) not in then] for group in built]
    fresh = {p: optimizer.state[p] for params in later for p in params if p in optimizer.state}
    optimizer.param_groups[len(groups) :] = []
    for place, names in enumerate(groups):
        params = [named[name] for name in names if name is not None]
        if place < len(built):
            optimizer.param_groups[place]["params"] = params
        else:
            optimizer.add_param_group({"params": params})
    _load(optimizer, state)
    optimizer.state.update(fresh)
    for place, params in enumerate(later):
        if place < len(groups):
            optimizer.param_groups[place]["params"] += params
        elif params:
            optimizer.param_groups.append({**built[place], "params": params})


def _load(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    try:
        optimizer.load_state_dict(dict(state))
    except ValueError as exc:
        raise ConfigError(
            f"the state is one of another optimizer: {exc}\n"
            "Hint: build the optimizer as it was built then; or take only the weights, with Estimator.load()."
        ) from exc


def named_parameters(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    return {prefix + name: p for prefix, module in modules.items() for name, p in module.named_parameters()}


class Modes:
    """Modules in evaluation mode in a model in training mode rest for the whole run (a frozen BatchNorm).

    All others train in every training step, whatever callbacks do in between. A model in evaluation mode as a
    whole says nothing about its parts.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._said = model.training
        self.resting = _resting(model)
        self._expected: list[tuple[nn.Module, bool]] = []
        self._trains: bool | None = None
        self._begun = False

    def recall(self, resting: Iterable[str]) -> None:
        """This model's own modes take precedence."""
        if not self._said:
            self.resting = set(resting)

    def train(self) -> None:
        if not self._begun:  # what `on_run_begin` has put to rest belongs to the beginning too
            self._begun = True
            self.resting |= _resting(self._model)
        if self._trains and all(module.training is mode for module, mode in self._expected):
            return
        self._model.train()  # first: a model may have its own idea of it
        modules = dict(self._model.named_modules())
        for name in self.resting & modules.keys():
            modules[name].training = False
        self._expected = [(module, module.training) for module in modules.values()]
        self._trains = True

    def evaluate(self) -> None:
        if self._trains is not False or self._model.training:
            self._model.eval()
            self._trains = False


def _resting(model: nn.Module) -> set[str]:
    if not model.training:
        return set()
    return {name for name, module in model.named_modules() if not module.training}
