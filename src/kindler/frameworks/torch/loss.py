"""Rules that make a loss exact over uneven ranks: targets in its own form, and what its mean divides by.

Summed gradients are those of one process only if each rank's loss is weighted by its share of the divisor:
values of an element-wise loss; targets not ignored, times class weights; rows of a user's own loss.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kindler.errors import ConfigError, DataError
from kindler.frameworks.creators import title
from kindler.frameworks.labels import LabelSource, refuse_non_classes, refuse_non_probabilities
from kindler.frameworks.torch.gather import without_rows

_BINARY_MODULES = (nn.BCELoss, nn.BCEWithLogitsLoss)
_BINARY_FUNCTIONS = (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
_ELEMENT_MODULES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, *_BINARY_MODULES)
_ELEMENT_FUNCTIONS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, *_BINARY_FUNCTIONS)
_CLASS_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
_CLASS_FUNCTIONS = (F.cross_entropy, F.nll_loss)
_LOGIT_MODULES = (nn.BCEWithLogitsLoss, nn.CrossEntropyLoss)
_LOGIT_FUNCTIONS = (F.binary_cross_entropy_with_logits, F.cross_entropy)
_HOW_BY_ROW = (
    "Hint: use a loss of torch.nn, give yours an attribute or an argument `reduction` that it respects when"
    ' it is "none", or let it return one loss for each row.'
)

Tensors = tuple[torch.Tensor, ...]


@dataclass(slots=True)
class Judged:
    """`loss * scale` is the sum over everything the loss is a mean of; divided by `weight` it is the mean.

    `per_row` is the number of values per row in `scale`; `opaque`: what the mean is over is unknown, so rows.
    """

    loss: torch.Tensor
    scale: float
    weight: float | torch.Tensor
    per_row: float = 1.0
    opaque: bool = False

    @property
    def total(self) -> torch.Tensor:
        loss = self.loss.detach()
        return loss if self.scale == 1.0 else loss * self.scale


Judge = Callable[..., Judged]  # of features, labels, rows, and where the labels come from


class LossRule:
    """A loss with its rule.

    Attributes:
        sums: It is a sum over rows: ranks' losses are added as they are.
        weighted: Its divisor depends on the batch, so ranks must also sum their divisors.
        elementwise: It has one target for each output value.
        binary: It is element-wise, and targets are probabilities.
        logits: Its outputs are scores around 0, not probabilities.
        all_count: Every label of the last batch is known to be a class, and none to be ignored.
        unknown: It is the user's own and does not say what it is a mean over.
    """

    sums = by_class = elementwise = binary = logits = all_count = unknown = False
    weighted = True
    ignored = -100
    _check: Callable[[LabelSource], bool | None] | None = None

    def __init__(self, loss: Any, *, varying: bool = False) -> None:
        function, options = _unwrapped(loss)
        self.function = loss
        self.by_class = isinstance(loss, _CLASS_MODULES) or function in _CLASS_FUNCTIONS
        self.elementwise = isinstance(loss, _ELEMENT_MODULES) or function in _ELEMENT_FUNCTIONS
        self.binary = isinstance(loss, _BINARY_MODULES) or function in _BINARY_FUNCTIONS
        self.logits = isinstance(loss, _LOGIT_MODULES) or function in _LOGIT_FUNCTIONS
        self.ignored = options.get("ignore_index", -100)
        # What a subclass with a forward of its own does with values and divisors is its own affair.
        self._plain = function is not None or _is_plain(loss, (*_CLASS_MODULES, *_ELEMENT_MODULES))
        reduction = options.get("reduction", "mean")
        means = self._plain and reduction == "mean"
        self.sums = reduction == "sum"
        self._by_batch = reduction == "batchmean"
        self.weighted = not self.sums and (varying or not (self.elementwise and means))
        self._class_weight = options.get("weight")
        self._by_targets = self.by_class and means
        self._by_elements = self.elementwise and means
        # A loss may say itself what its mean divides by.
        self._own_divisor = None if self.sums else getattr(loss, "loss_divisor", None)
        self.unknown = self._own_divisor is None and not _is_of_torch(loss, function)
        # The sum is exact where the mean is 0/0: a rank all of whose targets are ignored.
        self._loss = _reducing(loss, "sum") if self._by_targets else loss

    def __call__(
        self,
        outputs: Any,
        targets: Tensors,
        rows: int,
        source: LabelSource | None = None,
        weights: torch.Tensor | None = None,
    ) -> Judged:
        arguments, targets = self._arguments(outputs, targets)
        self.all_count = False
        if source is not None and len(targets) == 1 and isinstance(arguments[0], torch.Tensor):
            self._look_at(arguments[0], targets[0], source)
        loss = self._loss(*arguments) if weights is None else self._by_row(*arguments)
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(
                f"the loss {title(self.function)} must return a tensor, it returned {type(loss).__name__}.\n"
                "Hint: a function that creates the loss takes at most one argument, the config; one that "
                "takes"
                " more is the loss itself, and is called with (outputs, targets)."
            )
        if weights is not None:
            return self._with_weights(loss, weights, targets, rows)
        if self._by_targets:
            return self._weighed(loss, targets[0], rows)
        if self._own_divisor is not None:
            divisor = self._own_divisor(*arguments)
            return Judged(loss, divisor, divisor)
        return self._averaged(loss, targets, rows)

    def _arguments(self, outputs: Any, targets: Tensors) -> tuple[tuple[Any, ...], Tensors]:
        if isinstance(outputs, tuple | list):
            if len(outputs) == len(targets):
                pairs = zip(outputs, targets, strict=True)
                targets = tuple(self._fitted(o, t) if isinstance(o, torch.Tensor) else t for o, t in pairs)
            return (*outputs, *targets), targets
        if len(targets) == 1 and isinstance(outputs, torch.Tensor):
            targets = (self._fitted(outputs, targets[0]),)
        return (outputs, *targets), targets

    def unknown_parts(self) -> dict[str, LossRule]:
        return {f"the loss {title(self.function)}": self} if self.unknown else {}

    def tried(self, outputs: Any, targets: Tensors, rows: int, weights: torch.Tensor | None) -> list[Judged]:
        """Calls a copy of the loss, so that the loss itself does not change."""
        if not self.unknown:
            return []
        twin = copy.copy(self)
        twin.__dict__.pop("_by_row", None)
        twin.function = twin._loss = _copied(self.function)
        return [twin(outputs, targets, rows, weights=weights)]

    def take_part(self, outputs: Any, targets: Tensors) -> None:
        """Calls a gathering loss without rows, as the other ranks wait; the made-up row is cut off."""
        if self.unknown:
            self._loss(*without_rows(self._arguments(outputs, targets)[0]))

    @functools.cached_property
    def _by_row(self) -> Any:
        """Unchanged if nothing tells how: it may be unreduced already, which shows when it is called."""
        loss = self.function
        if isinstance(loss, nn.Module):
            return _reducing(loss, "none") if hasattr(loss, "reduction") else loss
        try:
            takes = "reduction" in inspect.signature(loss).parameters
        except (TypeError, ValueError):
            takes = False
        return _reducing(loss, "none") if takes else loss

    def _with_weights(
        self, values: torch.Tensor, weights: torch.Tensor, targets: Tensors, rows: int
    ) -> Judged:
        """Keeps the divisor of the unweighted loss."""
        if values.dim() == 0 or len(values) != rows:
            shape = "a single number" if values.dim() == 0 else f"shape {tuple(values.shape)}"
            raise ConfigError(
                "class_weight and weight_col need a loss for each row; the loss"
                f" {title(self.function)} returned {shape} for {rows} rows.\n{_HOW_BY_ROW}"
            )
        total = (values * weights.to(values.dtype).reshape(rows, *[1] * (values.dim() - 1))).sum()
        if self.sums:
            return Judged(total, 1.0, float(rows))
        if self._by_targets:
            return self._weighed(total, targets[0], rows)
        count = rows if self._by_batch else values.numel()
        return Judged(total, 1.0, float(count), per_row=count / rows)

    def _averaged(self, loss: torch.Tensor, targets: Tensors, rows: int) -> Judged:
        if self.sums:
            return Judged(loss.sum() if loss.dim() else loss, 1.0, float(rows))
        if loss.dim():  # not reduced: a mean over whatever there is
            return Judged(loss.mean() if loss.numel() else loss.sum(), *_both(loss.numel()))
        if self._by_elements:
            values = targets[0].numel()
            return Judged(loss, *_both(values), per_row=values / rows)
        return Judged(loss, *_both(rows), opaque=True)

    def _look_at(self, output: torch.Tensor, target: torch.Tensor, source: LabelSource) -> None:
        if self.by_class and not target.is_floating_point():
            self._check = functools.partial(
                refuse_non_classes, place=0, classes=output.shape[1], ignored=self.ignored
            )
        elif self._plain and (self.by_class or self.binary):
            self._check = functools.partial(refuse_non_probabilities, place=0)
        self.look(source)

    def look(self, source: LabelSource) -> None:
        """Checks nothing until a batch has shown what the loss needs."""
        self.all_count = self._check is not None and bool(self._check(source))

    def _fitted(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.by_class:
            fitted = as_classes(output, target)
            if self._plain and not self.logits and fitted.is_floating_point():
                raise DataError(
                    f"the label has shape {tuple(target.shape)}, like the model's output: this loss needs"
                    " class numbers.\nHint: pass the number of the class that is 1 in each row."
                )
            return fitted
        if self.elementwise:
            return _as_elements(output, target)
        if target.shape != output.shape and target.is_floating_point() and target.numel() == output.numel():
            return target.reshape(output.shape)
        return target

    def _weighed(self, loss: torch.Tensor, target: torch.Tensor, rows: int) -> Judged:
        if target.is_floating_point():  # probabilities of classes: a plain mean over all but the classes
            count = target.numel() / target.shape[1]
            return Judged(loss, 1.0, count, per_row=count / rows)
        return Judged(loss, 1.0, self._divisor(target), per_row=target.numel() / rows)

    def _divisor(self, target: torch.Tensor) -> float | torch.Tensor:
        if self._class_weight is None and self.all_count:
            return float(target.numel())
        kept = target != self.ignored
        if self._class_weight is None:
            count = kept.sum()
        else:
            # Not indexed with a mask: the number of rows that it keeps would have to come back from a GPU.
            weights = self._class_weight[torch.where(kept, target, 0)]
            count = torch.where(kept, weights, 0).sum()
        # On a GPU reading the number would wait for it.
        return count if count.is_cuda else float(count.item())


def _both(count: int) -> tuple[float, float]:
    return float(count), float(count)


def _unwrapped(loss: Any) -> tuple[Any, dict[str, Any]]:
    if isinstance(loss, functools.partial):
        return loss.func, dict(loss.keywords)
    if isinstance(loss, nn.Module):
        names = ("reduction", "weight", "ignore_index")
        return None, {name: getattr(loss, name) for name in names if hasattr(loss, name)}
    return loss, {}


def _is_plain(loss: Any, modules: tuple[type[nn.Module], ...]) -> bool:
    """Subclasses may divide differently."""
    return any(isinstance(loss, module) and type(loss).forward is module.forward for module in modules)


def _is_of_torch(loss: Any, function: Any) -> bool:
    """torch's own losses are all means over rows or over values."""
    made = function if function is not None else type(loss)
    return str(getattr(made, "__module__", "")).startswith("torch.nn.") or _is_plain(
        loss, (*_CLASS_MODULES, *_ELEMENT_MODULES)
    )


def _copied(loss: Any) -> Any:
    """Frozen parts, such as a teacher's weights, are shared."""
    frozen = [p for p in loss.parameters() if not p.requires_grad] if isinstance(loss, nn.Module) else []
    try:
        return copy.deepcopy(loss, {id(parameter): parameter for parameter in frozen})
    except Exception:  # noqa: BLE001 - an object of the user's that cannot be copied
        return loss


def _reducing(loss: Any, reduction: str) -> Any:
    if not isinstance(loss, nn.Module):
        return functools.partial(loss, reduction=reduction)
    twin: Any = copy.copy(loss)
    twin.reduction = reduction
    return twin


def _as_elements(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Nothing is ever broadcast."""
    if target.shape != output.shape:
        if not _same_order(tuple(output.shape), tuple(target.shape)):
            raise DataError(
                f"the model's output has shape {tuple(output.shape)} and the label {tuple(target.shape)}: an"
                " element-wise loss needs one label value for each output value, in the same order.\n"
                "Hint: give the model's last layer as many outputs as the label has, or choose another loss."
            )
        target = target.reshape(output.shape)
    return target if target.dtype == output.dtype else target.to(output.dtype)


def _same_order(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Whether values correspond one to one: shapes equal but for axes of length 1, or one is flat."""
    if math.prod(first) != math.prod(second) or first[:1] != second[:1]:
        return False
    slim = [[length for length in shape[1:] if length != 1] for shape in (first, second)]
    return slim[0] == slim[1] or min(len(part) for part in slim) <= 1


def as_classes(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Class numbers as int64, or probabilities in the output's shape; `labels.py` checks values."""
    if target.dim() == output.dim() and target.dim() > 1 and target.shape[1] == 1:
        target = target.squeeze(1)
    if target.shape == output.shape and target.dim() > 1:  # one-hot labels may be whole numbers
        return target if target.dtype == output.dtype else target.to(output.dtype)
    wanted = (output.shape[0], *output.shape[2:]) if output.dim() > 1 else ()
    if target.shape != wanted:
        raise DataError(
            f"the model's output has shape {tuple(output.shape)} and the label {tuple(target.shape)}: this"
            f" loss needs class numbers {tuple(wanted)} or class probabilities {tuple(output.shape)}."
        )
    return target if target.dtype == torch.int64 else target.to(torch.int64)


class RowWeights:
    """From a column (then the last label is a weight) or the label's class.

    As in Keras, a row's loss is multiplied by its weight, and the divisor stays that of the unweighted loss.
    """

    def __init__(self, classes: Mapping[int, float] | None, *, column: bool) -> None:
        self.column = column
        self._classes = dict(classes or {})
        self._table: torch.Tensor | None = None

    def split(self, labels: Tensors, *, trains: bool, by_class: bool) -> tuple[Tensors, torch.Tensor | None]:
        """None if all rows weigh the same."""
        weights: torch.Tensor | None = None
        if self.column:
            labels, weights = labels[:-1], labels[-1]
            if weights[:1].numel() > 1:
                shape = tuple(weights.shape[1:])
                raise ConfigError(f"weight_col needs one number per row; its rows have shape {shape}.")
            weights = weights.reshape(len(weights))
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


def _class_numbers(label: torch.Tensor, *, by_class: bool) -> torch.Tensor:
    if label.dim() == 2 and label.shape[1] > 1 and by_class and label.is_floating_point():
        return label.argmax(dim=1)
    if label[:1].numel() > 1:
        raise ConfigError(
            f"class_weight needs one class per row; the label's rows have shape {tuple(label.shape[1:])}.\n"
            "Hint: weight the values in the loss itself (CrossEntropyLoss(weight=...),"
            " BCEWithLogitsLoss(pos_weight=...)), or the rows by weight_col."
        )
    return label.reshape(len(label)).round().long()


def against_row_weights(loss: Any) -> list[str]:
    """As far as is known without calling it."""
    if not callable(loss):
        return [f"loss={loss!r} cannot return the loss of each row.\n{_HOW_BY_ROW}"]
    if hasattr(loss, "loss_divisor"):
        return [f"the loss {title(loss)} itself decides what its mean is divided by.\n{_HOW_BY_ROW}"]
    if (
        isinstance(loss, nn.Module)
        and type(loss).__module__.startswith("torch.")
        and not hasattr(loss, "reduction")
    ):
        return [f"the loss {title(loss)} has no reduction that could be turned off.\n{_HOW_BY_ROW}"]
    return []
