"""`bigdl.nn.criterion`: BigDL's criteria as losses of torch. Class numbers are counted from 1.

A criterion returns a mean over rows unless `size_average=False`, in which case it is a sum. Means that divide
by something else than rows say by what, so that workers with uneven rows weigh theirs exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from kindler.compat.bigdl.arguments import Configured, arguments, classes
from kindler.compat.bigdl.nn.conversion import are_arrays, gradients_of, to_tensors
from kindler.errors import ConfigError, DataError

_PADDING = -1  # the label of rows that do not count
_TINY = 1e-7


class Criterion(Configured, nn.Module, takes=arguments("size_average=True")):
    """Base class of criteria.

    Subclasses define `compute`. Those that take class numbers, counted from 1, set `one_based`.
    """

    one_based = False
    averages = True  # where `size_average` is not an argument

    __repr__ = nn.Module.__repr__

    def setup(self) -> None:
        self.size_average = vars(self).get("size_average", self.averages)
        self.reduction = "mean" if self.size_average else "sum"  # as torch's losses say it
        if "weights" in vars(self):
            weights = vars(self).pop("weights")
            vector = None if weights is None else torch.as_tensor(np.asarray(weights), dtype=torch.float32)
            self.register_buffer("weights", None if vector is None else vector.reshape(-1), persistent=False)

    def compute(self, output: Any, target: Any) -> Any:
        raise NotImplementedError

    def forward(self, *values: Any) -> Any:
        """The loss of an output, or a list of them, and a target: a tensor, or a number for arrays.

        The training loop passes the outputs of a table, then its targets, one after the other.
        """
        output, target, half = values[0], values[-1], len(values) // 2
        if len(values) > 2:
            output, target = list(values[:half]), list(values[half:])
            if len(values) % 2:
                output, target = list(values[:-1]), values[-1]
        if are_arrays(output):
            return float(self(to_tensors(output), to_tensors(target)).item())
        return self.compute(output, target)

    def backward(self, output: Any, target: Any) -> Any:
        """The gradient of the loss with respect to the output, for arrays."""
        tracked = to_tensors(output, tracked=True)
        with torch.enable_grad():
            self(tracked, to_tensors(target)).backward()
        return gradients_of(tracked)

    def reduced(self, values: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        """The mean of values, or over so many rows; their sum where that is asked for."""
        if not self.size_average:
            return values.sum()
        return values.mean() if rows is None else values.sum() / rows

    def weights_like(self, output: torch.Tensor) -> Any:
        return None if self.weights is None else self.weights.to(output.dtype)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def class_numbers(target: torch.Tensor, classes: int, *, ignored: int | None = None) -> torch.Tensor:
    """Class numbers counted from 0, one a row, out of labels counted from 1; the ignored label becomes -1."""
    flat = target.reshape(target.shape[0], -1).squeeze(-1) if target.dim() > 1 else target
    numbers = flat.long()
    none = numbers == ignored if ignored is not None else torch.zeros_like(numbers, dtype=torch.bool)
    if not flat.is_cuda:  # a GPU would have to be waited for
        wrong = (((numbers < 1) | (numbers > classes)) & ~none) | (flat != numbers)
        if bool(wrong.any()):
            raise DataError(
                f"labels must be whole numbers from 1 to {classes}, the number of outputs; received"
                f" {flat[wrong][0].item():g}.\n"
                "Hint: as in BigDL, the first class has the label 1; add 1 to labels that begin with 0."
            )
    return torch.where(none, torch.full_like(numbers, -1), numbers - 1)


def like(output: torch.Tensor, target: Any) -> torch.Tensor:
    """The target in the shape and the dtype of the output; nothing is ever broadcast."""
    tensor = target if isinstance(target, torch.Tensor) else torch.as_tensor(np.asarray(target))
    if tensor.numel() != output.numel():
        raise DataError(
            f"the output has the shape {tuple(output.shape)} and the label {tuple(tensor.shape)}: this"
            " criterion needs one label value for each output value."
        )
    return tensor.reshape(output.shape).to(output.dtype)


def matched(compute: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """A loss that gets the target in the shape of the output."""
    return lambda o, x, y: compute(o, x, like(x, y))


def _dice(o: Any, x: Any, y: Any) -> Any:
    """One minus the Dice coefficient of output and target, a mean over rows."""
    rows, labels = x.flatten(1), y.flatten(1)
    common = 2 * (rows * labels).sum(1) + o.epsilon
    return o.reduced(1 - common / (rows.sum(1) + labels.sum(1) + o.epsilon))


def _gaussian(o: Any, x: Any, y: Any) -> Any:
    """Minus the log-likelihood of targets under a Gaussian, a table of mean and log-variance; a sum."""
    mean, logarithm = x
    errors = (like(mean, y) - mean).square() / logarithm.exp()
    return (0.5 * (math.log(2 * math.pi) + logarithm + errors)).sum()


# Losses of an output x and a target y of the same shape.
_MATCHED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "MSECriterion": lambda o, x, y: (x - y).square().mean(),
    "AbsCriterion(size_average=True)": lambda o, x, y: o.reduced((x - y).abs()),
    "SmoothL1Criterion(size_average=True)": lambda o, x, y: F.smooth_l1_loss(x, y, reduction=o.reduction),
    # Of probabilities and one-hot labels.
    "CategoricalCrossEntropy": lambda o, x, y: (
        -(y * (x / x.sum(-1, keepdim=True)).clamp(_TINY, 1 - _TINY).log()).sum(-1).mean()
    ),
    # Of logarithms of probabilities from probabilities; the mean is over all values.
    "DistKLDivCriterion(size_average=True)": lambda o, x, y: o.reduced(
        torch.where(y > 0, y * (y.clamp(min=1e-38).log() - x), 0.0)
    ),
    # Of probabilities from probabilities, a mean over rows.
    "KullbackLeiblerDivergenceCriterion": lambda o, x, y: (
        (y.clamp(_TINY, 1) * (y.clamp(_TINY, 1) / x.clamp(_TINY, 1)).log()).sum(-1).mean()
    ),
    "SoftMarginCriterion(size_average=True)": lambda o, x, y: F.soft_margin_loss(x, y, reduction=o.reduction),
    # x where the label is 1, and `max(0, margin - x)` where it is -1.
    "HingeEmbeddingCriterion(margin=1, size_average=True)": lambda o, x, y: F.hinge_embedding_loss(
        x, y, o.margin, reduction=o.reduction
    ),
    "CosineDistanceCriterion(size_average=True)": lambda o, x, y: o.reduced(
        1 - F.cosine_similarity(x, y, -1)
    ),
    "CosineProximityCriterion": lambda o, x, y: -(F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).mean(),
    "DotProductCriterion(size_average=False)": lambda o, x, y: o.reduced(
        x * y, rows=x.shape[0] if x.dim() > 1 else 1
    ),
    "PoissonCriterion": lambda o, x, y: (x - y * (x + _TINY).log()).mean(),
    "MeanAbsolutePercentageCriterion": lambda o, x, y: (
        100 * ((x - y).abs() / y.abs().clamp(min=_TINY)).mean()
    ),
    "MeanSquaredLogarithmicCriterion": lambda o, x, y: (
        ((x.clamp(min=_TINY) + 1).log() - (y.clamp(min=_TINY) + 1).log()).square().mean()
    ),
    # Cross-entropy of the sigmoid and labels 0 and 1.
    "MultiLabelSoftMarginCriterion(weights=None, size_average=True)": lambda o, x, y: (
        F.multilabel_soft_margin_loss(x, y, o.weights_like(x), reduction=o.reduction)
    ),
    # Cross-entropy of probabilities and labels from 0 to 1, with a weight for each output of a row.
    "BCECriterion(weights=None, size_average=True)": lambda o, x, y: o.reduced(
        -(y * (x + 1e-12).log() + (1 - y) * (1 - x + 1e-12).log())
        * (1 if o.weights is None else o.weights_like(x))
    ),
    # `max(0, margin - y * x)`, or its square, with labels 1 and -1.
    "MarginCriterion(margin=1.0, size_average=True, squared=False)": lambda o, x, y: o.reduced(
        F.relu(o.margin - y * x) ** (2 if o.squared else 1)
    ),
    "DiceCoefficientCriterion(size_average=True, epsilon=1.0)": _dice,
}
# Those of tables, and of targets of another shape.
_OTHERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    # Of a table of two outputs, with labels 1 and -1; the same for the next one.
    "MarginRankingCriterion(margin=1.0, size_average=True)": lambda o, x, y: o.reduced(
        F.relu(-like(x[0], _first(y)) * (x[0] - x[1]) + o.margin)
    ),
    "CosineEmbeddingCriterion(margin=0.0, size_average=True)": lambda o, x, y: F.cosine_embedding_loss(
        x[0], x[1], _first(y).reshape(-1).to(x[0].dtype), o.margin, reduction=o.reduction
    ),
    # Of a Gaussian, a table of mean and log-variance, from a standard one.
    "KLDCriterion(size_average=True)": lambda o, x, y: o.reduced(
        0.5 * (x[0].square() + x[1].exp() - 1 - x[1]), rows=x[0].shape[0]
    ),
}
_SUMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "L1Cost": lambda o, x, y: x.abs().sum(),
    "GaussianCriterion": _gaussian,
}
_OF_CLASSES: dict[str, Callable[[Any, Any, Any], Any]] = {
    # Labels are the class numbers of a row; 0 ends their list.
    "MultiLabelMarginCriterion(size_average=True)": lambda o, x, y: F.multilabel_margin_loss(
        x, like(x, y).long() - 1, reduction=o.reduction
    ),
    # A margin between the right class and each other one, to the power `p`, a mean over classes.
    "MultiMarginCriterion(p=1, weights=None, margin=1.0, size_average=True)": lambda o, x, y: (
        F.multi_margin_loss(
            x,
            class_numbers(y.reshape(-1), x.shape[1]),
            o.p,
            o.margin,
            o.weights_like(x),
            reduction=o.reduction,
        )
    ),
}
_of_matched = {row: matched(compute) for row, compute in _MATCHED.items()}
globals().update(classes(__name__, Criterion, {**_of_matched, **_OTHERS}, "compute"))
globals().update(classes(__name__, Criterion, _SUMS, "compute", averages=False))
globals().update(classes(__name__, Criterion, _OF_CLASSES, "compute", one_based=True))


class ClassNLLCriterion(Criterion, takes=arguments("weights=None, size_average=True, logProbAsInput=True")):
    """Minus the logarithm of the probability of the right class; rows with the label -1 do not count.

    `weights` are those of classes; a mean divides by the sum of those of its rows. Without `logProbAsInput`
    the output is probabilities, otherwise their logarithms.
    """

    one_based = True

    def setup(self) -> None:
        super().setup()
        self.logarithms = vars(self).get("logProbAsInput", True)

    def log_probabilities(self, output: torch.Tensor) -> torch.Tensor:
        return output if self.logarithms else output.clamp(1e-8, 1 - 1e-8).log()

    def compute(self, output: Any, target: Any) -> Any:
        scores = self.log_probabilities(output if output.dim() > 1 else output.unsqueeze(0))
        weights = self._row_weights(scores, target)
        losses = -(scores.gather(1, self._classes(scores, target).clamp(min=0)[:, None])[:, 0])
        total = (losses * weights).sum()
        if not self.size_average:
            return total
        divisor = weights.sum()
        return total / torch.where(divisor == 0, 1.0, divisor)

    def loss_divisor(self, output: Any, target: Any) -> Any:
        divisor = self._row_weights(output if output.dim() > 1 else output.unsqueeze(0), target).sum()
        return divisor if divisor.is_cuda else float(divisor)

    def _classes(self, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        numbers = class_numbers(target.reshape(-1), scores.shape[1], ignored=_PADDING)
        if len(numbers) != len(scores):
            raise ConfigError(
                f"{type(self).__name__}: there are {len(scores)} rows of outputs and {len(numbers)} labels.\n"
                "Hint: wrap it in TimeDistributedCriterion for a label at each step of a sequence."
            )
        return numbers

    def _row_weights(self, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        numbers = self._classes(scores, target)
        if self.weights is None:
            return (numbers >= 0).to(scores.dtype)
        if len(self.weights) != scores.shape[1]:
            raise ConfigError(
                f"{type(self).__name__}: there are {len(self.weights)} weights for {scores.shape[1]} classes."
            )
        weights: torch.Tensor = self.weights_like(scores)
        return weights[numbers.clamp(min=0)] * (numbers >= 0)


class CrossEntropyCriterion(ClassNLLCriterion, takes=arguments("weights=None, size_average=True")):
    """`LogSoftMax` and `ClassNLLCriterion` in one."""

    def log_probabilities(self, output: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(output, 1)


class SoftmaxWithCriterion(Criterion, takes=arguments('ignore_label=None, normalize_mode="VALID"')):
    """The cross-entropy at each place of an image; outputs are (rows, classes, ...), labels (rows, ...).

    Places with `ignore_label` do not count. `normalize_mode` is what the sum is divided by: "FULL" all
    places, "VALID" those that count, "BATCH_SIZE" the rows, "NONE" nothing.
    """

    one_based = True

    def setup(self) -> None:
        self.mode = self.normalize_mode
        if self.mode not in ("FULL", "VALID", "BATCH_SIZE", "NONE"):
            raise ConfigError(f"SoftmaxWithCriterion: there is no normalize_mode {self.mode!r}.")
        self.size_average = self.mode != "NONE"
        super().setup()

    def compute(self, output: Any, target: Any) -> Any:
        numbers = self._numbers(output, target)
        scores = F.log_softmax(output, 1).movedim(1, -1).reshape(-1, output.shape[1])
        total = F.nll_loss(scores, numbers, ignore_index=-1, reduction="sum")
        return total if self.mode == "NONE" else total / max(1.0, self._count(output, numbers))

    def loss_divisor(self, output: Any, target: Any) -> float:
        return self._count(output, self._numbers(output, target))

    def _numbers(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return class_numbers(target.reshape(-1), output.shape[1], ignored=self.ignore_label)

    def _count(self, output: torch.Tensor, numbers: torch.Tensor) -> float:
        if self.mode == "BATCH_SIZE":
            return float(output.shape[0])
        return float((numbers >= 0).sum() if self.mode == "VALID" else numbers.numel())


class _Composite(Criterion, takes=arguments()):
    """Criteria and their weights."""

    def setup(self) -> None:
        super().setup()
        self.parts = torch.nn.ModuleList()
        self.part_weights: list[float] = []

    def add(self, criterion: Any, weight: float = 1.0) -> Any:
        """Append a criterion, whose loss counts so much; returns this one."""
        if not isinstance(criterion, Criterion):
            raise ConfigError(f"add takes a criterion of bigdl.nn.criterion; received {criterion!r}.")
        if self.parts and criterion.size_average != self.size_average:
            raise ConfigError(
                "criteria with and without size_average cannot be summed: workers could not weight the sum."
            )
        self.size_average, self.reduction = criterion.size_average, criterion.reduction
        self.one_based = self.one_based or criterion.one_based
        self.parts.append(criterion)
        self.part_weights.append(float(weight))
        return self


class MultiCriterion(_Composite):
    """The weighted sum of several criteria of the same output and target."""

    def compute(self, output: Any, target: Any) -> Any:
        pairs = zip(self.part_weights, self.parts, strict=True)
        return sum(weight * part(output, target) for weight, part in pairs)


class ParallelCriterion(_Composite, takes=arguments("repeat_target=False")):
    """The weighted sum of several criteria, the i-th of the i-th output and target, or of the one target."""

    def compute(self, output: Any, target: Any) -> Any:
        outputs = output if isinstance(output, list | tuple) else [output]
        targets = [_first(target)] * len(outputs) if self.repeat_target else target
        targets = targets if isinstance(targets, list | tuple) else [targets]
        if not len(outputs) == len(targets) == len(self.parts):
            raise ConfigError(
                f"ParallelCriterion has {len(self.parts)} criteria; received {len(outputs)} outputs and"
                f" {len(targets)} targets."
            )
        parts = zip(self.part_weights, self.parts, outputs, targets, strict=True)
        return sum(weight * part(out, label) for weight, part, out, label in parts)


class TimeDistributedCriterion(Criterion, takes=arguments("criterion, size_average=False, dimension=2")):
    """The sum of a criterion over the steps of sequences; with `size_average`, the mean.

    `dimension` is the axis of steps, counted from 1; the batch is the first.
    """

    def setup(self) -> None:
        self.criterion = vars(self).pop("criterion")
        self.over_steps, self.axis = self.size_average, self.dimension - 1
        self.one_based, self.size_average = self.criterion.one_based, self.criterion.size_average
        super().setup()

    def compute(self, output: Any, target: Any) -> Any:
        steps = output.shape[self.axis]
        outputs, targets = output.unbind(self.axis), target.unbind(self.axis)
        total = sum(self.criterion(out, label) for out, label in zip(outputs, targets, strict=True))
        return total / steps if self.over_steps else total


def _first(target: Any) -> Any:
    return target[0] if isinstance(target, list | tuple) else target


_OWN = [n for n, c in globals().items() if isinstance(c, type) and c.__module__ == __name__ and n[0] != "_"]
__all__ = [*_OWN]  # noqa: PLE0604 - names
