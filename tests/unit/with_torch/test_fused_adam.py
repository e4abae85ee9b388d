"""Fused steps of Adam by the shortest way: the numbers and the effects of `optimizer.step()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from kindler.frameworks.torch.optim import step_fused_adam, step_optimizer

pytestmark = pytest.mark.torch


def trained(
    kind: type[torch.optim.Optimizer], step: Callable[[Any], object], **options: Any
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    groups = [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2].parameters()}]
    optimizer = kind(groups, **{"lr": 0.01, "fused": True, **options})  # type: ignore[arg-type]
    for number in range(6):
        optimizer.zero_grad()
        rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
        # In some steps a part of the parameters has no gradient.
        (model(rows) if number % 3 else model[2](rows[:, :5])).square().mean().backward()
        optimizer.param_groups[0]["lr"] *= 0.9
        step(optimizer)
    return list(model.parameters()), optimizer


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"maximize": True}, {"amsgrad": True}, {"betas": (0.5, 0.6), "eps": 1e-3}],
    ids=str,
)
def test_weights_and_state_are_those_of_optimizer_step_bit_by_bit(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    ours, optimizer = trained(kind, step_optimizer, **options)
    theirs, reference = trained(kind, lambda optimizer: optimizer.step(), **options)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    made, expected = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert made.keys() == expected.keys()
    for number, state in expected.items():
        assert all(torch.equal(value, made[number][name]) for name, value in state.items())


def fresh(**options: Any) -> tuple[torch.nn.Parameter, torch.optim.Adam]:
    """A parameter with a gradient, and its optimizer after one step."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.Adam([parameter], **{"fused": True, **options})
    optimizer.step()
    return parameter, optimizer


def test_the_short_way_is_taken_once_there_is_a_state() -> None:
    _, optimizer = fresh()
    assert step_fused_adam(optimizer)
    optimizer.state.clear()
    assert not step_fused_adam(optimizer)


@pytest.mark.parametrize("options", [{"fused": False}, {"lr": torch.tensor(0.1)}, {"amsgrad": True}], ids=str)
def test_what_the_kernel_does_not_take_is_left_to_torch(options: dict[str, Any]) -> None:
    parameter, optimizer = fresh(**options)
    before = parameter.detach().clone()
    assert not step_fused_adam(optimizer)
    assert torch.equal(parameter, before)


def test_hooks_schedules_and_replaced_steps_are_told_of_every_step() -> None:
    told = []
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        _, optimizer = fresh()
        getattr(optimizer, register)(lambda *_, name=register: told.append(name))
        step_optimizer(optimizer)
    _, optimizer = fresh()
    handle = register_optimizer_step_post_hook(lambda *_: told.append("all"))
    try:
        step_optimizer(optimizer)
    finally:
        handle.remove()
    _, optimizer = fresh()
    optimizer.step = lambda: told.append("replaced")  # type: ignore[assignment, misc]
    step_optimizer(optimizer)
    assert told == ["register_step_pre_hook", "register_step_post_hook", "all", "replaced"]


@pytest.mark.filterwarnings("error")
def test_a_schedule_sees_that_the_optimizer_has_stepped() -> None:
    _, optimizer = fresh()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step_optimizer(optimizer)
    schedule.step()  # torch warns here where it does not know of a step
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0005)


def test_a_subclass_keeps_its_own_step() -> None:
    class Own(torch.optim.Adam):
        pass

    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = Own([parameter], fused=True)
    optimizer.step()
    assert not step_fused_adam(optimizer)
