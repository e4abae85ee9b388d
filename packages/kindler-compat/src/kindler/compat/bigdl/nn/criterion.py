"""`bigdl.nn.criterion`: BigDL's criteria as losses of torch. Class numbers are counted from 1."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from kindler.compat.bigdl.nn.criterion_base import Criterion, class_numbers, like
from kindler.errors import ConfigError

__all__ = [
    "AbsCriterion",
    "BCECriterion",
    "CategoricalCrossEntropy",
    "ClassNLLCriterion",
    "CosineDistanceCriterion",
    "CosineEmbeddingCriterion",
    "CosineProximityCriterion",
    "Criterion",
    "CrossEntropyCriterion",
    "DiceCoefficientCriterion",
    "DistKLDivCriterion",
    "DotProductCriterion",
    "GaussianCriterion",
    "HingeEmbeddingCriterion",
    "KLDCriterion",
    "KullbackLeiblerDivergenceCriterion",
    "L1Cost",
    "MSECriterion",
    "MarginCriterion",
    "MarginRankingCriterion",
    "MeanAbsolutePercentageCriterion",
    "MeanSquaredLogarithmicCriterion",
    "MultiCriterion",
    "MultiLabelMarginCriterion",
    "MultiLabelSoftMarginCriterion",
    "MultiMarginCriterion",
    "ParallelCriterion",
    "PoissonCriterion",
    "SmoothL1Criterion",
    "SoftMarginCriterion",
    "SoftmaxWithCriterion",
    "TimeDistributedCriterion",
]

_PADDING = -1  # the label of rows that do not count
_TINY = 1e-7


class ClassNLLCriterion(Criterion):
    """Minus the logarithm of the probability of the right class; rows with the label -1 do not count.

    Args:
        weights: A weight for each class; the mean divides by the sum of the weights of its rows.
        size_average: Whether the loss is a mean; otherwise it is a sum.
        logProbAsInput: Whether the output is logarithms of probabilities; otherwise it is probabilities.
        bigdl_type: Without effect.
    """

    one_based = True
    weights: torch.Tensor | None

    def __init__(
        self,
        weights: Any = None,
        size_average: bool = True,
        logProbAsInput: bool = True,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(size_average, bigdl_type)
        self.logarithms = logProbAsInput
        self.register_buffer("weights", None if weights is None else _vector(weights), persistent=False)

    def log_probabilities(self, output: torch.Tensor) -> torch.Tensor:
        """The logarithms of the probabilities of classes."""
        return output if self.logarithms else output.clamp(1e-8, 1 - 1e-8).log()

    def compute(self, output: Any, target: Any) -> Any:
        scores = self.log_probabilities(output if output.dim() > 1 else output.unsqueeze(0))
        total = -(scores.gather(1, self._classes(scores, target).clamp(min=0)[:, None])[:, 0])
        total = (total * self._row_weights(scores, target)).sum()
        if not self.size_average:
            return total
        divisor = self._row_weights(scores, target).sum()
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


class CrossEntropyCriterion(ClassNLLCriterion):
    """`LogSoftMax` and `ClassNLLCriterion` in one."""

    def __init__(self, weights: Any = None, size_average: bool = True, bigdl_type: str = "float") -> None:
        super().__init__(weights, size_average, bigdl_type=bigdl_type)

    def log_probabilities(self, output: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(output, 1)


class SoftmaxWithCriterion(Criterion):
    """The cross-entropy at each place of an image; outputs are (rows, classes, ...), labels (rows, ...).

    Args:
        ignore_label: A label whose places do not count.
        normalize_mode: What the sum is divided by: "FULL" all places, "VALID" those that count,
            "BATCH_SIZE" the rows, "NONE" nothing.
        bigdl_type: Without effect.
    """

    one_based = True

    def __init__(
        self, ignore_label: int | None = None, normalize_mode: str = "VALID", bigdl_type: str = "float"
    ) -> None:
        if normalize_mode not in ("FULL", "VALID", "BATCH_SIZE", "NONE"):
            raise ConfigError(f"SoftmaxWithCriterion: there is no normalize_mode {normalize_mode!r}.")
        super().__init__(normalize_mode != "NONE", bigdl_type)
        self.ignore_label, self.mode = ignore_label, normalize_mode

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


class CategoricalCrossEntropy(Criterion):
    """The cross-entropy of probabilities and one-hot labels."""

    def __init__(self, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type=bigdl_type)

    def compute(self, output: Any, target: Any) -> Any:
        shares = (output / output.sum(-1, keepdim=True)).clamp(_TINY, 1 - _TINY)
        return self.reduced(-(like(output, target) * shares.log()).sum(-1))


class MSECriterion(Criterion):
    """The mean squared error."""

    def __init__(self, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type=bigdl_type)

    def compute(self, output: Any, target: Any) -> Any:
        return (output - like(output, target)).square().mean()


class AbsCriterion(Criterion):
    """The mean absolute error."""

    def compute(self, output: Any, target: Any) -> Any:
        return self.reduced((output - like(output, target)).abs())


class SmoothL1Criterion(Criterion):
    """Half the squared error where that is below 0.5, otherwise the absolute error minus 0.5."""

    def compute(self, output: Any, target: Any) -> Any:
        return F.smooth_l1_loss(output, like(output, target), reduction=self.reduction)


class BCECriterion(Criterion):
    """The cross-entropy of probabilities and labels from 0 to 1.

    Args:
        weights: A weight for each output of a row.
        size_average: Whether the loss is a mean.
        bigdl_type: Without effect.
    """

    weights: torch.Tensor | None

    def __init__(self, weights: Any = None, size_average: bool = True, bigdl_type: str = "float") -> None:
        super().__init__(size_average, bigdl_type)
        self.register_buffer("weights", None if weights is None else _vector(weights), persistent=False)

    def compute(self, output: Any, target: Any) -> Any:
        target = like(output, target)
        losses = -(target * (output + 1e-12).log() + (1 - target) * (1 - output + 1e-12).log())
        return self.reduced(losses if self.weights is None else losses * self.weights.to(losses.dtype))


class DistKLDivCriterion(Criterion):
    """The divergence of logarithms of probabilities from probabilities; the mean is over all values."""

    def compute(self, output: Any, target: Any) -> Any:
        target = like(output, target)
        losses = torch.where(target > 0, target * (target.clamp(min=1e-38).log() - output), 0.0)
        return self.reduced(losses)


class KullbackLeiblerDivergenceCriterion(Criterion):
    """The divergence of probabilities from probabilities, a mean over rows."""

    def __init__(self, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type=bigdl_type)

    def compute(self, output: Any, target: Any) -> Any:
        output, target = output.clamp(_TINY, 1.0), like(output, target).clamp(_TINY, 1.0)
        return self.reduced((target * (target / output).log()).sum(-1))


class KLDCriterion(Criterion):
    """The divergence of a Gaussian, given as a table of mean and log-variance, from a standard one."""

    def compute(self, output: Any, target: Any) -> Any:
        mean, logarithm = output
        losses = 0.5 * (mean.square() + logarithm.exp() - 1 - logarithm)
        return self.reduced(losses, rows=mean.shape[0])


class GaussianCriterion(Criterion):
    """Minus the log-likelihood of targets under a Gaussian, a table of mean and log-variance; a sum."""

    def __init__(self, bigdl_type: str = "float") -> None:
        super().__init__(False, bigdl_type)

    def compute(self, output: Any, target: Any) -> Any:
        mean, logarithm = output
        errors = (like(mean, target) - mean).square() / logarithm.exp()
        return (0.5 * (math.log(2 * math.pi) + logarithm + errors)).sum()


class MarginCriterion(Criterion):
    """`max(0, margin - y * x)` with labels 1 and -1.

    Args:
        margin: The margin.
        size_average: Whether the loss is a mean.
        squared: Whether it is squared.
        bigdl_type: Without effect.
    """

    def __init__(
        self,
        margin: float = 1.0,
        size_average: bool = True,
        squared: bool = False,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(size_average, bigdl_type)
        self.margin, self.squared = float(margin), squared

    def compute(self, output: Any, target: Any) -> Any:
        losses = F.relu(self.margin - like(output, target) * output)
        return self.reduced(losses.square() if self.squared else losses)


class SoftMarginCriterion(Criterion):
    """`log(1 + exp(-y * x))` with labels 1 and -1."""

    def compute(self, output: Any, target: Any) -> Any:
        return F.soft_margin_loss(output, like(output, target), reduction=self.reduction)


class HingeEmbeddingCriterion(Criterion):
    """x where the label is 1, and `max(0, margin - x)` where it is -1."""

    def __init__(self, margin: float = 1, size_average: bool = True, bigdl_type: str = "float") -> None:
        super().__init__(size_average, bigdl_type)
        self.margin = float(margin)

    def compute(self, output: Any, target: Any) -> Any:
        return F.hinge_embedding_loss(output, like(output, target), self.margin, reduction=self.reduction)


class MarginRankingCriterion(Criterion):
    """`max(0, -y * (x1 - x2) + margin)` of a table of two outputs, with labels 1 and -1."""

    def __init__(self, margin: float = 1.0, size_average: bool = True, bigdl_type: str = "float") -> None:
        super().__init__(size_average, bigdl_type)
        self.margin = float(margin)

    def compute(self, output: Any, target: Any) -> Any:
        first, second = output
        label = like(first, _first(target))
        return self.reduced(F.relu(-label * (first - second) + self.margin))


class CosineEmbeddingCriterion(Criterion):
    """`1 - cos` of a table of two outputs where the label is 1, and `max(0, cos - margin)` where it is -1."""

    def __init__(self, margin: float = 0.0, size_average: bool = True, bigdl_type: str = "float") -> None:
        super().__init__(size_average, bigdl_type)
        self.margin = float(margin)

    def compute(self, output: Any, target: Any) -> Any:
        first, second = output
        label = _first(target).reshape(-1).to(first.dtype)
        return F.cosine_embedding_loss(first, second, label, self.margin, reduction=self.reduction)


class CosineDistanceCriterion(Criterion):
    """`1 - cos` of the angle between output and target."""

    def compute(self, output: Any, target: Any) -> Any:
        return self.reduced(1 - F.cosine_similarity(output, like(output, target), -1))


class CosineProximityCriterion(Criterion):
    """Minus the mean of the products of the elements of output and target, both of length 1."""

    def __init__(self, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type=bigdl_type)

    def compute(self, output: Any, target: Any) -> Any:
        return -(F.normalize(output, dim=-1) * F.normalize(like(output, target), dim=-1)).mean()


class L1Cost(Criterion):
    """The sum of absolute values of the output; the label does not matter."""

    def __init__(self, bigdl_type: str = "float") -> None:
        super().__init__(False, bigdl_type)

    def compute(self, output: Any, target: Any) -> Any:
        return output.abs().sum()


class DotProductCriterion(Criterion):
    """The dot product of output and target."""

    def __init__(self, size_average: bool = False, bigdl_type: str = "float") -> None:
        super().__init__(size_average, bigdl_type)

    def compute(self, output: Any, target: Any) -> Any:
        return self.reduced(output * like(output, target), rows=output.shape[0] if output.dim() > 1 else 1)


class DiceCoefficientCriterion(Criterion):
    """One minus the Dice coefficient of output and target, a mean over rows."""

    def __init__(self, size_average: bool = True, epsilon: float = 1.0, bigdl_type: str = "float") -> None:
        super().__init__(size_average, bigdl_type)
        self.epsilon = float(epsilon)

    def compute(self, output: Any, target: Any) -> Any:
        rows, labels = output.flatten(1), like(output, target).flatten(1)
        common = 2 * (rows * labels).sum(1) + self.epsilon
        return self.reduced(1 - common / (rows.sum(1) + labels.sum(1) + self.epsilon))


class PoissonCriterion(Criterion):
    """The mean of `x - y * log(x)`."""

    def __init__(self, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type=bigdl_type)

    def compute(self, output: Any, target: Any) -> Any:
        return (output - like(output, target) * (output + _TINY).log()).mean()


class MeanAbsolutePercentageCriterion(Criterion):
    """The mean absolute error in percent of the labels."""

    def __init__(self, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type=bigdl_type)

    def compute(self, output: Any, target: Any) -> Any:
        target = like(output, target)
        return 100 * ((output - target).abs() / target.abs().clamp(min=_TINY)).mean()


class MeanSquaredLogarithmicCriterion(Criterion):
    """The mean squared difference of `log(1 + x)`."""

    def __init__(self, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type=bigdl_type)

    def compute(self, output: Any, target: Any) -> Any:
        logarithms = [(part.clamp(min=_TINY) + 1).log() for part in (output, like(output, target))]
        return (logarithms[0] - logarithms[1]).square().mean()


class MultiLabelMarginCriterion(Criterion):
    """A margin between the classes of a row and the others; labels are class numbers, 0 ends their list."""

    one_based = True

    def compute(self, output: Any, target: Any) -> Any:
        return F.multilabel_margin_loss(
            output, target.reshape(output.shape).long() - 1, reduction=self.reduction
        )


class MultiLabelSoftMarginCriterion(Criterion):
    """The cross-entropy of the sigmoid of outputs and labels 0 and 1, a mean over classes.

    Args:
        weights: A weight for each class.
        size_average: Whether it is a mean over rows.
        bigdl_type: Without effect.
    """

    weights: torch.Tensor | None

    def __init__(self, weights: Any = None, size_average: bool = True, bigdl_type: str = "float") -> None:
        super().__init__(size_average, bigdl_type)
        self.register_buffer("weights", None if weights is None else _vector(weights), persistent=False)

    def compute(self, output: Any, target: Any) -> Any:
        weights = None if self.weights is None else self.weights.to(output.dtype)
        return F.multilabel_soft_margin_loss(output, like(output, target), weights, reduction=self.reduction)


class MultiMarginCriterion(Criterion):
    """A margin between the right class and each other one, to the power `p`, a mean over classes.

    Args:
        p: 1 or 2.
        weights: A weight for each class.
        margin: The margin.
        size_average: Whether it is a mean over rows.
        bigdl_type: Without effect.
    """

    one_based = True
    weights: torch.Tensor | None

    def __init__(
        self,
        p: int = 1,
        weights: Any = None,
        margin: float = 1.0,
        size_average: bool = True,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(size_average, bigdl_type)
        self.p, self.margin = p, float(margin)
        self.register_buffer("weights", None if weights is None else _vector(weights), persistent=False)

    def compute(self, output: Any, target: Any) -> Any:
        numbers = class_numbers(target.reshape(-1), output.shape[1])
        weights = None if self.weights is None else self.weights.to(output.dtype)
        return F.multi_margin_loss(output, numbers, self.p, self.margin, weights, reduction=self.reduction)


class _Composite(Criterion):
    """Criteria and their weights."""

    def __init__(self, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type=bigdl_type)
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


class ParallelCriterion(_Composite):
    """The weighted sum of several criteria, the i-th of the i-th output and target.

    Args:
        repeat_target: Whether there is one target for all outputs.
        bigdl_type: Without effect.
    """

    def __init__(self, repeat_target: bool = False, bigdl_type: str = "float") -> None:
        super().__init__(bigdl_type)
        self.repeat_target = repeat_target

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


class TimeDistributedCriterion(Criterion):
    """The sum of a criterion over the steps of sequences; with `size_average`, the mean.

    Args:
        criterion: The criterion of a step.
        size_average: Whether to divide by the number of steps.
        dimension: The axis of steps, counted from 1; the batch is the first.
        bigdl_type: Without effect.
    """

    def __init__(
        self, criterion: Any, size_average: bool = False, dimension: int = 2, bigdl_type: str = "float"
    ) -> None:
        super().__init__(criterion.size_average, bigdl_type)
        self.criterion, self.over_steps, self.axis = criterion, size_average, dimension - 1
        self.one_based = criterion.one_based

    def compute(self, output: Any, target: Any) -> Any:
        steps = output.shape[self.axis]
        outputs, targets = output.unbind(self.axis), target.unbind(self.axis)
        total = sum(self.criterion(out, label) for out, label in zip(outputs, targets, strict=True))
        return total / steps if self.over_steps else total


def _first(target: Any) -> Any:
    return target[0] if isinstance(target, list | tuple) else target


def _vector(weights: Any) -> torch.Tensor:
    from kindler.compat.bigdl.util.arrays import JTensor

    values = weights.to_ndarray() if isinstance(weights, JTensor) else weights
    return torch.as_tensor(values, dtype=torch.float32).reshape(-1)
