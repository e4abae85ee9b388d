"""Reports steps whose loss is NaN or infinite, and skips them on request; undoes the user's own steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kindler.frameworks.labels import LabelSource
from kindler.frameworks.torch import private

if TYPE_CHECKING:
    from kindler.train.loss_guard import LossGuard

_SHOWN_ROWS = 8
Undo = Callable[[], None]


class StepGuard:
    def __init__(self, watch: LossGuard, names: Sequence[str]) -> None:
        self._watch, self._names = watch, names
        self._bad = False

    @property
    def skips(self) -> bool:
        """Skipping needs every loss at once."""
        return self._watch.skips

    def begin_step(self) -> None:
        self._bad = False

    @property
    def bad(self) -> bool:
        """Knows only this rank's losses and gradients."""
        return self.skips and self._bad

    def look_at_gradients(self, gradients: Iterable[torch.Tensor | None]) -> None:
        if self.skips and not self._bad:
            self._bad = not _all_finite([gradient for gradient in gradients if gradient is not None])

    def skip(self) -> None:
        self._watch.skip()

    def passes(
        self, step: int, loss: torch.Tensor, features: Sequence[torch.Tensor], source: LabelSource, rows: int
    ) -> bool:
        """False if the loss is not finite and steps are skipped."""
        if loss.is_cuda and not self.skips:
            if not torch.cuda.is_current_stream_capturing():
                self.replayed(step, loss.detach(), source, rows)
            return True
        describe = lambda: (_first_rows(source, rows), self._oddity(features, source))  # noqa: E731
        if not self._watch.saw(step, loss.item(), describe):
            self._bad = True
        return not (self._bad and self.skips)

    def replayed(self, step: int, loss: torch.Tensor, source: LabelSource, rows: int) -> None:
        """Looks at it soon, without waiting for the GPU."""
        where = LabelSource((), (), source.where)  # which does not keep the batch
        self._watch.note(step, loss, lambda: (_first_rows(where, rows), ""), _values)

    def _oddity(self, features: Sequence[torch.Tensor], source: LabelSource) -> str:
        for place, feature in enumerate(features):
            if not feature.is_floating_point() or not len(feature):
                continue
            bad = ~torch.isfinite(feature.reshape(len(feature), -1)).all(dim=1)
            if bool(bad.any()):
                row = int(bad.int().argmax())
                name = repr(self._names[place]) if place < len(self._names) else f"input {place}"
                return f"Row {source.where(row)} has a value in {name} that is not finite."
        return ""


def _first_rows(source: LabelSource, rows: int) -> list[int | str]:
    return [source.where(row) for row in range(min(rows, _SHOWN_ROWS))]


def _values(losses: Sequence[torch.Tensor]) -> list[float]:
    values: list[float] = torch.stack([loss.float() for loss in losses]).tolist() if losses else []
    return values


def _all_finite(gradients: list[torch.Tensor]) -> bool:
    return not gradients or bool(
        torch.isfinite(torch.stack(private.foreach_norm(gradients, float("inf")))).all()
    )


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


def undo_parameter(parameter: torch.nn.Parameter) -> Undo:
    value, grad, learns = parameter.detach().clone(), parameter.grad, parameter.requires_grad
    held = None if grad is None else grad.detach().clone()

    def put_back() -> None:
        parameter.copy_(value)
        parameter.grad = None if grad is None else _given_back(grad, held)
        parameter.requires_grad_(learns)

    return put_back


def undo_optimizer(optimizer: torch.optim.Optimizer) -> Undo:
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


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _given_back(now: Any, kept: Any) -> Any:
    """Restores into the current tensor: others may hold it."""
    if isinstance(now, torch.Tensor) and isinstance(kept, torch.Tensor) and now.shape == kept.shape:
        return now.copy_(kept)
    return kept
