"""Copies everything that a user's own step may change, so that it can be undone as a whole.

What the user's code keeps besides parameters, buffers and metrics is not covered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from kindler.frameworks.torch.buffers import Tracked
from kindler.frameworks.torch.metrics import is_metric
from kindler.frameworks.torch.optimizers import Optimizers, Schedules
from kindler.frameworks.torch.state import snapshot

Undo = Callable[[], None]


def undo_of(
    parameters: Iterable[torch.nn.Parameter],
    tracked: Tracked,
    optimizers: Optimizers,
    schedules: Schedules | None,
) -> Undo:
    undo = [
        *(_parameter(parameter) for parameter in {id(p): p for p in parameters}.values()),
        _buffers(tracked),
        *(_metric(part) for part in tracked.modules() if is_metric(part)),
        *(_optimizer(optimizer) for optimizer in optimizers.named.values()),
        *([] if schedules is None else [_schedules(schedules)]),
    ]

    def put_back() -> None:
        with torch.no_grad():
            for each in undo:
                each()

    return put_back


def attributes_of(modules: Iterable[torch.nn.Module]) -> Undo:
    """Includes the lists, dicts and sets in modules' attributes."""
    before = [(module, dict(module.__dict__)) for module in modules]
    within = [
        (value, copy.copy(value))
        for _, attributes in before
        for value in attributes.values()
        if type(value) in (list, dict, set)
    ]

    def put_back() -> None:
        for value, kept in within:
            value.clear()
            value.extend(kept) if isinstance(value, list) else value.update(kept)
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)

    return put_back


def _parameter(parameter: torch.nn.Parameter) -> Undo:
    value, grad = parameter.detach().clone(), parameter.grad
    held = None if grad is None else grad.detach().clone()

    def put_back() -> None:
        parameter.copy_(value)
        parameter.grad = None if grad is None else _given_back(grad, held)

    return put_back


def _buffers(tracked: Tracked) -> Undo:
    before = snapshot(tracked)

    def put_back() -> None:
        for buffer, value in zip(tracked.buffers(), before, strict=True):
            buffer.copy_(value)

    return put_back


def _metric(metric: Any) -> Undo:
    # Lists only grow: what is in them stays as it is.
    before = {
        name: list(state) if isinstance(state, list) else _kept(state) for name, state in _states(metric)
    }
    updates = metric._update_count

    def put_back() -> None:
        for name, state in before.items():
            setattr(metric, name, state)
        metric._update_count, metric._computed = updates, None

    return put_back


def _states(metric: Any) -> Iterator[tuple[str, Any]]:
    return ((name, getattr(metric, name)) for name in metric._reductions)


def _optimizer(optimizer: torch.optim.Optimizer) -> Undo:
    states = {p: {name: _kept(v) for name, v in state.items()} for p, state in optimizer.state.items()}
    groups = [
        {name: _kept(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]

    def put_back() -> None:
        for parameter in [p for p in optimizer.state if p not in states]:
            del optimizer.state[parameter]
        for parameter, state in states.items():
            now = optimizer.state[parameter]
            optimizer.state[parameter] = {name: _given_back(now.get(name), v) for name, v in state.items()}
        del optimizer.param_groups[len(groups) :]
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            for name in [name for name in group if name != "params" and name not in values]:
                del group[name]
            group.update({name: _given_back(group.get(name), value) for name, value in values.items()})

    return put_back


def _schedules(schedules: Schedules) -> Undo:
    before = copy.deepcopy(schedules.state_dict())
    return lambda: schedules.load_state_dict(before)


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _given_back(now: Any, kept: Any) -> Any:
    """Restores into the current tensor: others may hold it."""
    if isinstance(now, torch.Tensor) and isinstance(kept, torch.Tensor) and now.shape == kept.shape:
        return now.copy_(kept)
    return kept
