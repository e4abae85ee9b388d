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

from kindler.compat.bigdl.arguments import Configured, arguments
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
        """The loss of a batch."""
        raise NotImplementedError

    def forward(self, *values: Any) -> Any:
        """The loss of an output, or a list of them, and a target: a tensor, or a number for arrays."""
        output, target = _halves(values)
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

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def _halves(values: tuple[Any, ...]) -> tuple[Any, Any]:
    """Outputs and targets; the training loop passes those of tables one after the other."""
    if len(values) == 2:
        return values[0], values[1]
    half = len(values) // 2
    if len(values) == 2 * half:
        return list(values[:half]), list(values[half:])
    return list(values[:-1]), values[-1]


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


def criterion(
    name: str,
    compute: Callable[[Any, Any, Any], Any],
    *texts: str,
    averages: bool = True,
    matched: bool = True,
) -> Any:
    """A class of criteria that is a row of a table.

    Args:
        name: The name of the class.
        compute: The loss, a function of the criterion, the output and the target.
        texts: The arguments of the constructor.
        averages: Whether it is a mean, where `size_average` is not an argument.
        matched: Whether `compute` gets the target in the shape of the output.
    """

    def of_matched(self: Any, output: Any, target: Any) -> Any:
        return compute(self, output, like(output, target))

    body = {"__module__": __name__, "averages": averages, "compute": of_matched if matched else compute}
    return type(name, (Criterion,), body, takes=arguments(*texts))


# x is the output, y the target.

MSECriterion = criterion("MSECriterion", lambda self, x, y: (x - y).square().mean())
AbsCriterion = criterion("AbsCriterion", lambda self, x, y: self.reduced((x - y).abs()), "size_average=True")
SmoothL1Criterion = criterion(
    "SmoothL1Criterion",
    lambda self, x, y: F.smooth_l1_loss(x, y, reduction=self.reduction),
    "size_average=True",
)
CategoricalCrossEntropy = criterion(
    "CategoricalCrossEntropy",  # of probabilities and one-hot labels
    lambda self, x, y: -(y * (x / x.sum(-1, keepdim=True)).clamp(_TINY, 1 - _TINY).log()).sum(-1).mean(),
)
DistKLDivCriterion = criterion(
    "DistKLDivCriterion",  # of logarithms of probabilities from probabilities; the mean is over all values
    lambda self, x, y: self.reduced(torch.where(y > 0, y * (y.clamp(min=1e-38).log() - x), 0.0)),
    "size_average=True",
)
KullbackLeiblerDivergenceCriterion = criterion(
    "KullbackLeiblerDivergenceCriterion",  # of probabilities from probabilities, a mean over rows
    lambda self, x, y: (y.clamp(_TINY, 1) * (y.clamp(_TINY, 1) / x.clamp(_TINY, 1)).log()).sum(-1).mean(),
)
SoftMarginCriterion = criterion(
    "SoftMarginCriterion",
    lambda self, x, y: F.soft_margin_loss(x, y, reduction=self.reduction),
    "size_average=True",
)
HingeEmbeddingCriterion = criterion(
    "HingeEmbeddingCriterion",  # x where the label is 1, and `max(0, margin - x)` where it is -1
    lambda self, x, y: F.hinge_embedding_loss(x, y, self.margin, reduction=self.reduction),
    "margin=1, size_average=True",
)
CosineDistanceCriterion = criterion(
    "CosineDistanceCriterion",
    lambda self, x, y: self.reduced(1 - F.cosine_similarity(x, y, -1)),
    "size_average=True",
)
CosineProximityCriterion = criterion(
    "CosineProximityCriterion", lambda self, x, y: -(F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).mean()
)
DotProductCriterion = criterion(
    "DotProductCriterion",
    lambda self, x, y: self.reduced(x * y, rows=x.shape[0] if x.dim() > 1 else 1),
    "size_average=False",
)
PoissonCriterion = criterion("PoissonCriterion", lambda self, x, y: (x - y * (x + _TINY).log()).mean())
MeanAbsolutePercentageCriterion = criterion(
    "MeanAbsolutePercentageCriterion",
    lambda self, x, y: 100 * ((x - y).abs() / y.abs().clamp(min=_TINY)).mean(),
)
MeanSquaredLogarithmicCriterion = criterion(
    "MeanSquaredLogarithmicCriterion",
    lambda self, x, y: ((x.clamp(min=_TINY) + 1).log() - (y.clamp(min=_TINY) + 1).log()).square().mean(),
)
L1Cost = criterion("L1Cost", lambda self, x, y: x.abs().sum(), averages=False, matched=False)
MultiLabelSoftMarginCriterion = criterion(
    "MultiLabelSoftMarginCriterion",  # cross-entropy of the sigmoid and labels 0 and 1
    lambda self, x, y: F.multilabel_soft_margin_loss(
        x, y, None if self.weights is None else self.weights.to(x.dtype), reduction=self.reduction
    ),
    "weights=None, size_average=True",
)

MarginRankingCriterion = criterion(
    "MarginRankingCriterion",  # of a table of two outputs, with labels 1 and -1
    lambda self, x, y: self.reduced(F.relu(-like(x[0], _first(y)) * (x[0] - x[1]) + self.margin)),
    "margin=1.0, size_average=True",
    matched=False,
)
CosineEmbeddingCriterion = criterion(
    "CosineEmbeddingCriterion",  # of a table of two outputs, with labels 1 and -1
    lambda self, x, y: F.cosine_embedding_loss(
        x[0], x[1], _first(y).reshape(-1).to(x[0].dtype), self.margin, reduction=self.reduction
    ),
    "margin=0.0, size_average=True",
    matched=False,
)
KLDCriterion = criterion(
    "KLDCriterion",  # of a Gaussian, a table of mean and log-variance, from a standard one
    lambda self, x, y: self.reduced(0.5 * (x[0].square() + x[1].exp() - 1 - x[1]), rows=x[0].shape[0]),
    "size_average=True",
    matched=False,
)
MultiLabelMarginCriterion = criterion(
    "MultiLabelMarginCriterion",  # labels are the class numbers of a row; 0 ends their list
    lambda self, x, y: F.multilabel_margin_loss(x, y.long() - 1, reduction=self.reduction),
    "size_average=True",
)
MultiLabelMarginCriterion.one_based = True


class GaussianCriterion(Criterion, takes=arguments()):
    """Minus the log-likelihood of targets under a Gaussian, a table of mean and log-variance; a sum."""

    averages = False

    def compute(self, output: Any, target: Any) -> Any:
        mean, logarithm = output
        errors = (like(mean, target) - mean).square() / logarithm.exp()
        return (0.5 * (math.log(2 * math.pi) + logarithm + errors)).sum()


class BCECriterion(Criterion, takes=arguments("weights=None, size_average=True")):
    """The cross-entropy of probabilities and labels from 0 to 1, with a weight for each output of a row."""

    def compute(self, output: Any, target: Any) -> Any:
        target = like(output, target)
        losses = -(target * (output + 1e-12).log() + (1 - target) * (1 - output + 1e-12).log())
        return self.reduced(losses if self.weights is None else losses * self.weights.to(losses.dtype))


class MarginCriterion(Criterion, takes=arguments("margin=1.0, size_average=True, squared=False")):
    """`max(0, margin - y * x)`, or its square, with labels 1 and -1."""

    def compute(self, output: Any, target: Any) -> Any:
        losses = F.relu(self.margin - like(output, target) * output)
        return self.reduced(losses.square() if self.squared else losses)


class DiceCoefficientCriterion(Criterion, takes=arguments("size_average=True, epsilon=1.0")):
    """One minus the Dice coefficient of output and target, a mean over rows."""

    def compute(self, output: Any, target: Any) -> Any:
        rows, labels = output.flatten(1), like(output, target).flatten(1)
        common = 2 * (rows * labels).sum(1) + self.epsilon
        return self.reduced(1 - common / (rows.sum(1) + labels.sum(1) + self.epsilon))


class MultiMarginCriterion(Criterion, takes=arguments("p=1, weights=None, margin=1.0, size_average=True")):
    """A margin between the right class and each other one, to the power `p`, a mean over classes."""

    one_based = True

    def compute(self, output: Any, target: Any) -> Any:
        numbers = class_numbers(target.reshape(-1), output.shape[1])
        weights = None if self.weights is None else self.weights.to(output.dtype)
        return F.multi_margin_loss(output, numbers, self.p, self.margin, weights, reduction=self.reduction)


class ClassNLLCriterion(Criterion, takes=arguments("weights=None, size_average=True, logProbAsInput=True")):
    """Minus the logarithm of the probability of the right class; rows with the label -1 do not count.

    Args:
        weights: A weight for each class; the mean divides by the sum of the weights of its rows.
        size_average: Whether the loss is a mean; otherwise it is a sum.
        logProbAsInput: Whether the output is logarithms of probabilities; otherwise it is probabilities.
    """

    one_based = True

    def setup(self) -> None:
        super().setup()
        self.logarithms = vars(self).get("logProbAsInput", True)

    def log_probabilities(self, output: torch.Tensor) -> torch.Tensor:
        """The logarithms of the probabilities of classes."""
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
        """What the mean divides by."""
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
        weights = self.weights.to(scores.dtype)[numbers.clamp(min=0)]
        return torch.where(numbers >= 0, weights, torch.zeros_like(weights))


class CrossEntropyCriterion(ClassNLLCriterion, takes=arguments("weights=None, size_average=True")):
    """`LogSoftMax` and `ClassNLLCriterion` in one."""

    def log_probabilities(self, output: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(output, 1)


class SoftmaxWithCriterion(Criterion, takes=arguments('ignore_label=None, normalize_mode="VALID"')):
    """The cross-entropy at each place of an image; outputs are (rows, classes, ...), labels (rows, ...).

    Args:
        ignore_label: A label whose places do not count.
        normalize_mode: What the sum is divided by: "FULL" all places, "VALID" those that count,
            "BATCH_SIZE" the rows, "NONE" nothing.
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
        """What the mean divides by."""
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
                "criteria with and without size_average cannot be added up: workers could not weigh the sum."
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
