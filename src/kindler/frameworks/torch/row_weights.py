"""Row weights, from a column or the label's class.

As in Keras, a row's loss is multiplied by its weight, and the divisor stays that of the unweighted loss.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from kindler.errors import ConfigError
from kindler.frameworks.creators import title

_HOW = (
    "Hint: use a loss of torch.nn, give yours an attribute or an argument `reduction` that it respects when"
    ' it is "none", or let it return one loss for each row.'
)


class RowWeights:
    """`column`: the last label is a weight."""

    def __init__(self, classes: Mapping[int, float] | None, *, column: bool) -> None:
        self.column = column
        self._classes = dict(classes or {})
        self._table: torch.Tensor | None = None

    def split(
        self, labels: tuple[torch.Tensor, ...], *, trains: bool, by_class: bool
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """None if all rows weigh the same."""
        weights: torch.Tensor | None = None
        if self.column:
            *own, given = labels
            labels, weights = tuple(own), _one_per_row(given)
        if trains and self._classes:
            if len(labels) != 1:
                raise ConfigError(f"class_weight needs one label column; there are {len(labels)}.")
            by_label = self._of(_class_numbers(labels[0], by_class=by_class))
            weights = by_label if weights is None else weights * by_label
        return labels, weights

    def _of(self, numbers: torch.Tensor) -> torch.Tensor:
        if self._table is None or self._table.device != numbers.device:
            known = [self._classes.get(number, 1.0) for number in range(max(self._classes) + 1)]
            self._table = torch.tensor([*known, 1.0], device=numbers.device)
        others = len(self._table) - 1
        inside = (numbers >= 0) & (numbers < others)
        return self._table[torch.where(inside, numbers, others)]


def _one_per_row(weights: torch.Tensor) -> torch.Tensor:
    if weights[:1].numel() > 1:
        raise ConfigError(
            f"sample_weight_col needs one number a row; its rows have shape {tuple(weights.shape[1:])}."
        )
    return weights.reshape(len(weights))


def _class_numbers(label: torch.Tensor, *, by_class: bool) -> torch.Tensor:
    if label.dim() == 2 and label.shape[1] > 1 and by_class and label.is_floating_point():
        return label.argmax(dim=1)
    if label[:1].numel() > 1:
        raise ConfigError(
            f"class_weight needs one class a row; the label's rows have shape {tuple(label.shape[1:])}.\n"
            "Hint: weigh the values in the loss itself (CrossEntropyLoss(weight=...),"
            " BCEWithLogitsLoss(pos_weight=...)), or the rows by sample_weight_col."
        )
    return label.reshape(len(label)).round().long()


def unreduced(loss: Any) -> Any:
    """Unchanged if nothing tells how: it may be unreduced already, which shows when it is called."""
    if isinstance(loss, nn.Module):
        if not hasattr(loss, "reduction"):
            return loss
        twin: Any = copy.copy(loss)
        twin.reduction = "none"
        return twin
    return functools.partial(loss, reduction="none") if _takes_reduction(loss) else loss


def refuse_reduced(values: torch.Tensor, rows: int, loss: Any) -> None:
    if values.dim() == 0 or len(values) != rows:
        shape = "a single number" if values.dim() == 0 else f"shape {tuple(values.shape)}"
        raise ConfigError(
            f"class_weight and sample_weight_col need a loss for each row; the loss {title(loss)} returned"
            f" {shape} for {rows} rows.\n{_HOW}"
        )


def against_row_weights(loss: Any) -> list[str]:
    """As far as is known without calling it."""
    if not callable(loss):
        return [f"loss={loss!r} cannot be asked for the loss of a row.\n{_HOW}"]
    if hasattr(loss, "loss_divisor"):
        return [f"the loss {title(loss)} decides itself what its mean divides by.\n{_HOW}"]
    if (
        isinstance(loss, nn.Module)
        and type(loss).__module__.startswith("torch.")
        and not hasattr(loss, "reduction")
    ):
        return [f"the loss {title(loss)} has no reduction that could be left out.\n{_HOW}"]
    return []


def _takes_reduction(function: Any) -> bool:
    try:
        return "reduction" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
