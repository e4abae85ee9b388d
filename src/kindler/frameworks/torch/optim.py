"""Builds the optimizer and its schedule, in their fast form."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from kindler.errors import ConfigError
from kindler.frameworks.creators import call, keywords, title
from kindler.frameworks.torch.fused_adam import step_fused_adam
from kindler.frameworks.torch.spec import (
    CLOSURE,
    PLATEAU_STEP,
    SPARSE,
    TorchSpec,
    is_optimizer_class,
    needs_closure,
)

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_FUSED_DTYPES = (torch.float32, torch.float64)


def build_optimizer(spec: TorchSpec, model: torch.nn.Module) -> torch.optim.Optimizer:
    """`model` must be on its device already."""
    given = spec.optimizer
    if given is None:
        raise ConfigError("training needs an optimizer.\nHint: pass optimizer=torch.optim.Adam, say.")
    if isinstance(given, torch.optim.Optimizer):
        optimizer = given
    elif is_optimizer_class(given):
        optimizer = _made_of_class(given, model)
    else:
        optimizer = call(given, model, spec.config)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{title(given)} must return a torch.optim.Optimizer, it returned {optimizer!r}.")
    if needs_closure(type(optimizer)):
        raise ConfigError(CLOSURE.format(name=type(optimizer).__name__))
    _fuse(optimizer, model)
    if optimizer.state:  # a used instance: its state follows the parameters to their device
        optimizer.load_state_dict(optimizer.state_dict())
    return optimizer


def with_rate(given: Any, rate: float) -> Any:
    """Changes an instance in place."""
    if given is None:
        raise ConfigError(f"learning_rate={rate}: the estimator has no optimizer.")
    if isinstance(given, torch.optim.Optimizer):
        return _rated(given, rate)
    return functools.partial(given, lr=rate) if is_optimizer_class(given) else _Rated(given, rate)


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


def build_scheduler(spec: TorchSpec, optimizer: torch.optim.Optimizer) -> Any:
    if spec.scheduler_creator is None:
        return None
    scheduler = call(spec.scheduler_creator, optimizer, spec.config)
    if not hasattr(scheduler, "step"):
        raise ConfigError(
            f"{title(spec.scheduler_creator)} must return a learning-rate scheduler,"
            f" it returned {scheduler!r}."
        )
    _refuse_blind(scheduler, spec.scheduler_step)
    return scheduler


def refuse_several(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(SPARSE)


def _refuse_blind(scheduler: Any, moves: str) -> None:
    if not isinstance(scheduler, ReduceLROnPlateau):
        return
    if moves == "step":
        raise ConfigError(PLATEAU_STEP)
    if scheduler.mode == "max":
        raise ConfigError(
            "ReduceLROnPlateau(mode='max') waits for a figure that grows, but is shown the training loss"
            " of each"
            " epoch.\nHint: leave mode='min'; a callback can follow another figure, and lower the rate in"
            " run.optimizer.param_groups."
        )


def step_optimizer(optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
    if type(optimizer) is torch.optim.SGD:
        for group in optimizer.param_groups:
            if group["fused"] and group["momentum"] and _some_are_new(group, optimizer.state):
                group["fused"] = None
    if scaler is None:
        if not step_fused_adam(optimizer):
            optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def _some_are_new(group: Mapping[str, Any], state: Mapping[Any, Any]) -> bool:
    """torch's fused SGD needs momentum for all parameters or none."""
    have = ["momentum_buffer" in state.get(p, ()) for p in group["params"] if p.grad is not None]
    return any(have) and not all(have)


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


def step_scheduler(scheduler: Any, logs: Mapping[str, float] | None) -> None:
    if not isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step()
        return
    if logs is None or "loss" not in logs:
        raise ConfigError('ReduceLROnPlateau needs the loss of the epoch: end_epoch(logs={"loss": ...}).')
    scheduler.step(logs["loss"])


def _made_of_class(given: Any, model: torch.nn.Module) -> Any:
    by_name = "params" in keywords(given)
    return given(params=model.parameters()) if by_name else given(model.parameters())


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
