"""torch's fused Adam and AdamW: the same kernel with less Python, which takes longer for small models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer


def step_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    """False if nothing was done: the step is not an ordinary fused one."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or _is_watched(optimizer):
        return False
    groups = [_tensors(group, optimizer.state) for group in optimizer.param_groups]
    if None in groups:  # before any of them has moved
        return False
    with torch.no_grad():
        for group, tensors in zip(optimizer.param_groups, groups, strict=True):
            if tensors and tensors[0]:
                _move(group, *tensors)
    return True


def _is_watched(optimizer: Any) -> bool:
    return bool(
        "step" in vars(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or torch.autograd.profiler._is_profiler_enabled
        or getattr(optimizer, "grad_scale", None) is not None
        or getattr(optimizer, "found_inf", None) is not None
    )


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


def _move(
    group: Mapping[str, Any],
    moved: list[torch.Tensor],
    grads: list[torch.Tensor],
    means: list[torch.Tensor],
    squares: list[torch.Tensor],
    steps: list[torch.Tensor],
) -> None:
    torch._foreach_add_(steps, 1)
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    kernel(
        moved,
        grads,
        means,
        squares,
        [],
        steps,
        amsgrad=False,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        grad_scale=None,
        found_inf=None,
    )
