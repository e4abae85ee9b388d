"""What a loss needs to be exact over uneven ranks: targets in its own form, and what its mean divides by.

Summing gradients over ranks gives the gradient of one process only if each rank's loss is weighted by its
share of the divisor. For most losses that is the number of rows; class weights and ignored targets make it
depend on the targets. `torch.py` runs the loss and `sync/` adds up; here is only the rule.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kindler.errors import DataError

__all__ = ["Judged", "LossRule"]

_ELEMENT_MODULES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)
_ELEMENT_FUNCTIONS = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)
_CLASS_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
_CLASS_FUNCTIONS = (F.cross_entropy, F.nll_loss)


@dataclass(slots=True)
class Judged:
    """One batch's loss.

    Attributes:
        loss: A scalar to differentiate.
        rows_scale: `loss * rows_scale` is the loss summed over rows.
        weight: What that sum is divided by to give the mean, in rows.
    """

    loss: torch.Tensor
    rows_scale: float
    weight: float | torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        """The sum over rows, detached."""
        return self.loss.detach() * self.rows_scale


class LossRule:
    """A loss with its rule.

    Attributes:
        sums: The loss adds up over rows: ranks' losses are added as they are.
        weighted: Its divisor depends on the targets, so ranks must add up their divisors too.
        logits: Its outputs are scores around 0, not probabilities.
    """

    def __init__(self, loss: Any) -> None:
        function, options = _unwrapped(loss)
        by_class = _is_plain(loss, _CLASS_MODULES) or function in _CLASS_FUNCTIONS
        reduction = options.get("reduction", "mean")
        self.sums = reduction == "sum"
        self.weighted = by_class and reduction == "mean"
        self.elementwise = isinstance(loss, _ELEMENT_MODULES) or function in _ELEMENT_FUNCTIONS
        self.by_class = by_class or isinstance(loss, _CLASS_MODULES)
        self.logits = isinstance(loss, nn.BCEWithLogitsLoss) or function is F.binary_cross_entropy_with_logits
        self._class_weight = options.get("weight")
        self._ignored: int = options.get("ignore_index", -100)
        # The sum is exact where the mean is 0/0: a rank all of whose targets are ignored.
        self._loss = _summing(loss) if self.weighted else loss

    def __call__(self, outputs: Any, targets: tuple[torch.Tensor, ...], rows: int) -> Judged:
        """Judge one batch of `rows` rows."""
        if isinstance(outputs, tuple | list):
            targets = self._fitted_all(outputs, targets)
            loss = self._loss(*outputs, *targets)
        else:
            if len(targets) == 1 and isinstance(outputs, torch.Tensor):
                targets = (self._fitted(outputs, targets[0]),)
            loss = self._loss(outputs, *targets)
        if self.weighted:
            return self._weighed(loss, targets[0], rows)
        if loss.dim():
            loss = loss.sum() if self.sums else loss.mean()
        return Judged(loss, 1.0 if self.sums else float(rows), float(rows))

    def _fitted_all(
        self, outputs: tuple[Any, ...] | list[Any], targets: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Targets in the form of their outputs, where there is one target for each output."""
        if len(outputs) != len(targets):
            return targets
        pairs = zip(outputs, targets, strict=True)
        return tuple(self._fitted(out, t) if isinstance(out, torch.Tensor) else t for out, t in pairs)

    def _fitted(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.by_class:
            return _as_classes(output, target)
        if self.elementwise:
            return _as_elements(output, target)
        if target.shape != output.shape and target.is_floating_point() and target.numel() == output.numel():
            return target.reshape(output.shape)
        return target

    def _weighed(self, loss: torch.Tensor, target: torch.Tensor, rows: int) -> Judged:
        if target.is_floating_point():  # probabilities of classes: a plain mean over rows
            per_row = target.numel() / rows / target.shape[1]
            return Judged(loss, 1.0 / per_row, float(rows))
        per_row = target.numel() / rows
        return Judged(loss, 1.0 / per_row, self._divisor(target) / per_row)

    def _divisor(self, target: torch.Tensor) -> float | torch.Tensor:
        kept = target != self._ignored
        if self._class_weight is None:
            count = kept.sum()
        else:
            count = self._class_weight[target[kept]].sum()
        # On a GPU reading the number would wait for it.
        return count if count.is_cuda else float(count.item())


def _unwrapped(loss: Any) -> tuple[Any, dict[str, Any]]:
    """The function behind a loss, if it is one, and its options."""
    if isinstance(loss, functools.partial):
        return loss.func, dict(loss.keywords)
    if isinstance(loss, nn.Module):
        names = ("reduction", "weight", "ignore_index")
        return None, {name: getattr(loss, name) for name in names if hasattr(loss, name)}
    return loss, {}


def _is_plain(loss: Any, modules: tuple[type[nn.Module], ...]) -> bool:
    """Whether it is one of these modules and computes as they do: subclasses may divide as they like."""
    return any(isinstance(loss, module) and type(loss).forward is module.forward for module in modules)


def _summing(loss: Any) -> Any:
    if not isinstance(loss, nn.Module):
        return functools.partial(loss, reduction="sum")
    twin: Any = copy.copy(loss)
    twin.reduction = "sum"
    return twin


def _as_elements(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The target with the output's shape and dtype: nothing is ever broadcast."""
    if target.shape != output.shape:
        if target.numel() != output.numel() or target.shape[:1] != output.shape[:1]:
            raise DataError(
                f"the model's output has shape {tuple(output.shape)} and the label {tuple(target.shape)}: an"
                " element-wise loss needs one label value for each output value.\n"
                "Hint: give the model's last layer as many outputs as the label has, or choose another loss."
            )
        target = target.reshape(output.shape)
    return target if target.dtype == output.dtype else target.to(output.dtype)


def _as_classes(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Class numbers (N, ...) as int64, or class probabilities in the output's own shape."""
    if target.dim() == output.dim() and target.dim() > 1 and target.shape[1] == 1 != output.shape[1]:
        target = target.squeeze(1)
    if target.shape == output.shape and target.is_floating_point() and target.dim() > 1:
        return target if target.dtype == output.dtype else target.to(output.dtype)
    wanted = (output.shape[0], *output.shape[2:]) if output.dim() > 1 else ()
    if target.shape != wanted:
        raise DataError(
            f"the model's output has shape {tuple(output.shape)} and the label {tuple(target.shape)}: this"
            f" loss needs class numbers {tuple(wanted)} or class probabilities {tuple(output.shape)}."
        )
    return target if target.dtype == torch.int64 else target.to(torch.int64)
