"""The metrics that go by a name: "accuracy", "mse" and "mae".

Each gives a sum and how many values it counted, so that batches of any shape merge exactly. What "accuracy"
means follows from the loss, which knows what form the labels have; where that is not known it is refused,
since a wrong guess would be a plausible number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kindler.errors import ConfigError
from kindler.frameworks.torch.loss import LossRule, as_classes

__all__ = ["NAMES", "Counted", "counted"]

Sums = tuple[torch.Tensor, Any]


@dataclass(frozen=True, slots=True)
class Counted:
    """A metric that gives its sum over a batch, and the number of values in it."""

    name: str
    measure: Callable[[torch.Tensor, torch.Tensor], Sums]

    def __call__(self, outputs: Any, target: Any) -> Sums:
        """Measure one batch."""
        if not isinstance(outputs, torch.Tensor) or not isinstance(target, torch.Tensor):
            raise ConfigError(
                f"the metric {self.name!r} needs a model with one output and one label.\n"
                "Hint: pass a function of (outputs, targets); it gets all of them."
            )
        return self.measure(outputs, target)


def counted(name: str, loss: LossRule | None = None) -> Counted:
    """The metric of this name, for a model that is trained with this loss."""
    if name not in NAMES:
        raise ConfigError(f"unknown metric {name!r}. There are: {', '.join(map(repr, NAMES))}.")
    if name == "accuracy":
        return Counted(name, _accuracy_for(loss))
    return Counted(name, _MEASURES[name])


def _accuracy_for(loss: LossRule | None) -> Callable[[torch.Tensor, torch.Tensor], Sums]:
    if loss is not None and loss.by_class:
        return lambda outputs, target: _by_class(outputs, target, None if loss.all_count else loss.ignored)
    if loss is not None and loss.binary:
        cut = 0.0 if loss.logits else 0.5
        return lambda outputs, target: _binary(outputs, target, cut)
    scores = loss is None or not loss.elementwise
    return lambda outputs, target: _by_form(outputs, target, scores=scores)


def _by_class(outputs: torch.Tensor, target: torch.Tensor, ignored: int | None) -> Sums:
    """The share of targets whose class has the highest score; ignored ones do not count."""
    target = as_classes(outputs, target)
    guess = outputs.argmax(dim=1)
    if target.is_floating_point():
        return (guess == target.argmax(dim=1)).double().sum(), guess.numel()
    if ignored is None:
        return (guess == target).sum(), guess.numel()
    kept = target != ignored
    return ((guess == target) & kept).double().sum(), kept.sum()


def _binary(outputs: torch.Tensor, target: torch.Tensor, cut: float) -> Sums:
    """The share of values on the right side of the cut: of rows, or of each label of each row."""
    return ((outputs > cut).reshape(target.shape) == (target > 0.5)).double().sum(), target.numel()


def _by_form(outputs: torch.Tensor, target: torch.Tensor, *, scores: bool) -> Sums:
    """For losses that do not say: class numbers, or one output of a row and labels 0 and 1.

    Args:
        outputs: The model's.
        target: The label.
        scores: Whether outputs might be scores around 0, so that a cut at 0.5 would be a guess.
    """
    if outputs.dim() > 1 and outputs.shape[1] > 1:
        slim = target.squeeze(1) if target.dim() == outputs.dim() and target.shape[1] == 1 else target
        if slim.shape != (outputs.shape[0], *outputs.shape[2:]):
            raise _unclear(
                f"outputs of shape {tuple(outputs.shape)} and labels of {tuple(target.shape)} could be"
                f" one class"
                " of several or several labels"
            )
        return (outputs.argmax(dim=1) == slim).double().sum(), slim.numel()
    if outputs.numel() != target.numel():
        raise _unclear(f"outputs have shape {tuple(outputs.shape)} and labels {tuple(target.shape)}")
    if not bool(((target == 0) | (target == 1)).all()):
        raise _unclear("there are labels other than 0 and 1")
    if scores and not bool(((outputs >= 0) & (outputs <= 1)).all()):
        raise _unclear("there are outputs outside 0 to 1, and the loss does not say where to cut scores")
    return _binary(outputs, target, 0.5)


def _unclear(why: str) -> ConfigError:
    return ConfigError(
        f"what 'accuracy' means is not clear here: {why}.\n"
        "Hint: pass a metric of torchmetrics, or a function of (outputs, targets) that is a mean over rows."
    )


def _mse(outputs: torch.Tensor, target: torch.Tensor) -> Sums:
    return _differences(outputs, target).square().sum(), target.numel()


def _mae(outputs: torch.Tensor, target: torch.Tensor) -> Sums:
    return _differences(outputs, target).abs().sum(), target.numel()


def _differences(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if outputs.numel() != target.numel():
        raise ConfigError(
            f"the metrics 'mse' and 'mae' need one label value for each output value; outputs have shape"
            f" {tuple(outputs.shape)} and labels {tuple(target.shape)}."
        )
    return (outputs - target.reshape(outputs.shape)).double()


_MEASURES = {"mse": _mse, "mae": _mae}
NAMES = ("accuracy", *_MEASURES)
