"""Builds optimizers and their schedules, in their fast form; several by name look like one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from kindler.errors import ConfigError
from kindler.frameworks.creators import call, keywords, title
from kindler.frameworks.torch import private
from kindler.frameworks.torch import spec as specs
from kindler.frameworks.torch import state as states

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_FUSED_DTYPES = (torch.float32, torch.float64)
ONLY = "optimizer"  # the name of one that was given without a name


def build_optimizer(spec: specs.TorchSpec, model: torch.nn.Module) -> torch.optim.Optimizer:
    """`model` must be on its device already."""
    given = spec.optimizer
    if given is None:
        raise ConfigError(
            "training needs an optimizer.\nHint: pass an optimizer, such as optimizer=torch.optim.Adam."
        )
    if isinstance(given, torch.optim.Optimizer):
        optimizer = given
    elif specs.is_optimizer_class(given):
        by_name = "params" in keywords(given)
        optimizer = given(params=model.parameters()) if by_name else given(model.parameters())
    else:
        optimizer = call(given, model, spec.config)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{title(given)} must return a torch.optim.Optimizer, it returned {optimizer!r}.")
    if specs.needs_closure(type(optimizer)):
        raise ConfigError(specs.CLOSURE.format(name=type(optimizer).__name__))
    _fuse(optimizer, model)
    if optimizer.state:  # a used instance: its state follows the parameters to their device
        optimizer.load_state_dict(optimizer.state_dict())
    return optimizer


def with_rate(given: Any, rate: float) -> Any:
    """Changes an instance in place."""
    if given is None:
        raise ConfigError(f"learning_rate={rate}: the estimator has no optimizer.")
    if isinstance(given, Mapping):
        raise ConfigError(
            f"learning_rate={rate}: there are several optimizers, {', '.join(map(repr, given))}.\n"
            "Hint: read their rates from the config in their creators, and pass config={...}."
        )
    if isinstance(given, torch.optim.Optimizer):
        return _rated(given, rate)
    return functools.partial(given, lr=rate) if specs.is_optimizer_class(given) else _Rated(given, rate)


def _rated(optimizer: Any, rate: float) -> Any:
    for group in getattr(optimizer, "param_groups", ()):
        group["lr"] = rate
    return optimizer


@dataclass(frozen=True)
class _Rated:
    creator: Any
    rate: float

    def __call__(self, model: Any, config: dict[str, Any]) -> Any:
        return _rated(call(self.creator, model, config), self.rate)


def step_optimizer(optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
    if type(optimizer) is torch.optim.SGD:
        for group in optimizer.param_groups:
            if group["fused"] and group["momentum"]:  # which torch needs for all parameters or none
                moved = [p for p in group["params"] if p.grad is not None]
                have = ["momentum_buffer" in optimizer.state.get(p, ()) for p in moved]
                if any(have) and not all(have):
                    group["fused"] = None
    if scaler is None:
        if not step_fused_adam(optimizer):
            optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def bytes_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Found by trying a small parameter."""
    if optimizer.state:
        return 0
    total = 0
    for group in optimizer.param_groups:
        tried = torch.nn.Parameter(torch.zeros(8, 8))
        tried.grad = torch.zeros_like(tried)
        try:
            small: Any = type(optimizer)([{**group, "params": [tried]}], **optimizer.defaults)
            small.step()
        except Exception:  # noqa: BLE001 - one of the user's own, of which nothing is known
            continue
        kept = [value for value in small.state[tried].values() if isinstance(value, torch.Tensor)]
        copies = sum(value.nbytes for value in kept) / tried.nbytes
        total += int(copies * sum(p.nbytes for p in group["params"] if p.requires_grad))
    return total


def _fuse(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Only if the user left the choice open; computes the same in another order, much faster on a CPU."""
    if type(optimizer) not in _FUSED or any(getattr(module, "sparse", False) for module in model.modules()):
        return
    devices = ("cpu",) if isinstance(optimizer, torch.optim.Adagrad) else ("cpu", "cuda")
    if all(_fusible(group, devices) for group in optimizer.param_groups):
        for group in optimizer.param_groups:
            group["fused"] = True


def _fusible(group: Mapping[str, Any], devices: tuple[str, ...]) -> bool:
    left_open = group.get("fused", False) is None and group.get("foreach") is None
    special = group.get("differentiable") or group.get("capturable") or isinstance(group["lr"], torch.Tensor)
    return (
        left_open
        and not special
        and all(p.device.type in devices and p.dtype in _FUSED_DTYPES for p in group["params"])
    )


def step_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    """The same kernel with less Python, which takes longer for small models.

    False if nothing was done: the step is not an ordinary fused one.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or private.is_watched(optimizer):
        return False
    groups = [_tensors(group, optimizer.state) for group in optimizer.param_groups]
    if None in groups:  # before any of them has moved
        return False
    with torch.no_grad():
        for group, tensors in zip(optimizer.param_groups, groups, strict=True):
            if not tensors or not tensors[0]:
                continue
            *moved, steps = tensors
            private.foreach_add_(steps, 1)
            kernel: Any = private.fused_adamw_ if group["decoupled_weight_decay"] else private.fused_adam_
            beta1, beta2 = group["betas"]
            options = {name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")}
            options |= {"beta1": beta1, "beta2": beta2, "grad_scale": None, "found_inf": None}
            kernel(*moved, [], steps, amsgrad=False, **options)
    return True


def _tensors(group: Mapping[str, Any], state: Mapping[Any, Any]) -> list[list[torch.Tensor]] | None:
    """None if `step()` has more to decide."""
    special = group["amsgrad"] or group["capturable"] or group["differentiable"]
    numbers = (group["lr"], *group["betas"])
    if not group["fused"] or special or not all(isinstance(number, float | int) for number in numbers):
        return None
    moved = [parameter for parameter in group["params"] if parameter.grad is not None]
    lists: list[list[torch.Tensor]] = [moved, [], [], [], []]
    for parameter in moved:
        known, grad, first = state.get(parameter), parameter.grad, moved[0]
        if (
            not known  # its first step
            or grad.layout is not torch.strided
            or not parameter.dtype is grad.dtype is first.dtype
            or not parameter.dtype.is_floating_point
            or parameter.device != first.device
        ):
            return None
        for place, tensor in zip(
            lists[1:], (grad, known["exp_avg"], known["exp_avg_sq"], known["step"]), strict=True
        ):
            place.append(tensor)
    return lists


class Optimizers:
    """Looks like one optimizer with the groups and state of all."""

    def __init__(self, named: Mapping[str, torch.optim.Optimizer]) -> None:
        self.named = dict(named)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.named.values() for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """For a parameter that two of them move, the last one's."""
        return {key: value for optimizer in self.named.values() for key, value in optimizer.state.items()}

    def __getitem__(self, name: str) -> torch.optim.Optimizer:
        return self.named[name]

    def __iter__(self) -> Any:
        return iter(self.named)

    def kept(self, modules: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
        """Includes the names of the parameters."""
        return {
            name: {"state": optimizer.state_dict(), "groups": states.group_names(optimizer, modules)}
            for name, optimizer in self.named.items()
        }

    def load(self, kept: Mapping[str, Any], modules: Mapping[str, torch.nn.Module]) -> None:
        if kept.keys() != self.named.keys():
            raise ConfigError(
                f"the state belongs to the optimizers {', '.join(map(repr, kept))}, and these are"
                f" {', '.join(map(repr, self.named))}.\n"
                "Hint: give them the same names; or load only the weights, with load_weights()."
            )
        for name, optimizer in self.named.items():
            states.load_optimizer(optimizer, kept[name]["state"], kept[name]["groups"], modules)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`monitor` is for ReduceLROnPlateau; `strict` makes its absence an error."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True


class Schedules:
    def __init__(self, schedules: Mapping[str, Schedule]) -> None:
        self._all = schedules
        self.named = {name: one.scheduler for name, one in schedules.items()}

    def after_step(self, number: int) -> None:
        """`number` counts from 1."""
        for one in self._all.values():
            if one.interval == "step" and number % one.frequency == 0:
                one.scheduler.step()

    def after_epoch(self, number: int, logs: Mapping[str, float]) -> None:
        """`number` counts from 1."""
        for one in self._all.values():
            if one.interval != "epoch" or number % one.frequency:
                continue
            if not isinstance(one.scheduler, ReduceLROnPlateau):
                one.scheduler.step()
                continue
            # Validation metrics are also found with the prefix "val_".
            names = (str(one.monitor), f"val_{str(one.monitor).removeprefix('val/')}")
            if known := [name for name in names if name in logs]:
                one.scheduler.step(float(logs[known[0]]))
            elif one.strict:
                raise ConfigError(
                    f"ReduceLROnPlateau monitors {one.monitor!r}, and the epoch's metrics are"
                    f" {', '.join(map(repr, logs))}."
                )

    def state_dict(self) -> dict[str, Any]:
        return {name: schedule.state_dict() for name, schedule in self.named.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Schedules missing from the state start anew."""
        for name in self.named.keys() & state.keys():
            self.named[name].load_state_dict(state[name])


def build_optimizers(spec: specs.TorchSpec, model: torch.nn.Module) -> Optimizers:
    given = spec.optimizer if isinstance(spec.optimizer, Mapping) else {ONLY: spec.optimizer}
    return Optimizers(
        {str(name): build_optimizer(replace(spec, optimizer=one), model) for name, one in given.items()}
    )


def build_schedules(spec: specs.TorchSpec, optimizers: Optimizers) -> Schedules | None:
    given = spec.scheduler
    if given is None:
        return None
    by_name = given if isinstance(given, Mapping) else dict.fromkeys(optimizers.named, given)
    schedules = {}
    for name, creator in by_name.items():
        scheduler = call(creator, optimizers[str(name)], spec.config)
        if not hasattr(scheduler, "step"):
            raise ConfigError(
                f"{title(creator)} must return a learning-rate scheduler, it returned {scheduler!r}."
            )
        if isinstance(scheduler, ReduceLROnPlateau):
            if spec.scheduler_step == "step":
                raise ConfigError(specs.PLATEAU_STEP)
            if scheduler.mode == "max":
                raise ConfigError(
                    "ReduceLROnPlateau(mode='max') waits for a metric that grows, but receives the training"
                    " loss of each epoch.\nHint: leave mode='min'; a callback can follow another metric, and"
                    " lower the rate in run.optimizer.param_groups."
                )
        schedules[str(name)] = Schedule(scheduler=scheduler, interval=spec.scheduler_step, monitor="loss")
    return Schedules(schedules)
