"""Metrics with a name; batches merge exactly into one value.

What a class metric means follows from the loss, which knows the form of outputs and labels, or else from
their shapes and values; if these leave it open it is refused: a wrong guess would be a plausible number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.nn import functional as F

from kindler.errors import ConfigError, did_you_mean
from kindler.frameworks.torch.loss import LossRule, as_classes

Sums = tuple[torch.Tensor, Any]
State = tuple[torch.Tensor, ...]
Measure = Callable[[torch.Tensor, torch.Tensor], Any]

NAMES = ("accuracy", "auc", "f1", "precision", "recall", "log_loss", "mse", "rmse", "mae", "r2", "top_5")
_ALIASES = {
    "acc": "accuracy",
    "roc_auc": "auc",
    "auroc": "auc",
    "f1_score": "f1",
    "logloss": "log_loss",
    "mean_squared_error": "mse",
    "root_mean_squared_error": "rmse",
    "mean_absolute_error": "mae",
    "r2_score": "r2",
}
_TOP = re.compile(r"top_?([1-9]\d*)(_accuracy)?")


@dataclass(frozen=True, slots=True)
class Counted:
    """`measure` returns a batch's sum and count; `finish` turns the mean into the metric."""

    name: str
    measure: Measure
    finish: Callable[[float], float] = float

    def __call__(self, outputs: Any, target: Any) -> Sums:
        sums: Sums = self.measure(*_plain_pair(self.name, outputs, target))
        return sums


@dataclass(frozen=True, slots=True)
class Gathered:
    """`grows`: the state has something of every row."""

    name: str
    measure: Measure
    join: Callable[[Sequence[State]], State]
    value: Callable[[State], float]
    grows: bool = False

    def __call__(self, outputs: Any, target: Any) -> State:
        state: State = self.measure(*_plain_pair(self.name, outputs, target))
        return state

    def joined(self, states: Sequence[State]) -> list[State]:
        return [self.join(states)] if len(states) > 1 else list(states)

    def computed(self, states: Sequence[State]) -> float:
        return float(self.value(self.join(states))) if states else math.nan


def known_name(name: str) -> bool:
    return _ALIASES.get(name, name) in NAMES or _TOP.fullmatch(name) is not None


def unknown_name(name: str) -> str:
    choices = ", ".join(map(repr, NAMES[:-1]))
    return (
        f"unknown metric {name!r}.{did_you_mean(name, NAMES)} There are: {choices}, and 'top_5' for the share"
        " of rows whose class is among the five with the highest scores, or any other number.\n"
        "Hint: a metric may also be a torchmetrics.Metric, or a function of (outputs, targets)."
    )


def named(name: str, loss: LossRule | None = None) -> Counted | Gathered:
    plain = _ALIASES.get(name, name)
    if top := _TOP.fullmatch(plain):
        return Counted(name, partial(_top, name, int(top[1]), loss))
    if plain not in NAMES:
        raise ConfigError(unknown_name(name))
    votes = partial(votes_of, loss, name)
    if plain == "accuracy":
        if loss is None or not loss.by_class:
            return Counted(name, lambda outputs, target: votes(outputs, target).accuracy())
        return Counted(name, partial(_class_accuracy, loss))
    if plain == "log_loss":
        return Counted(name, lambda outputs, target: votes(outputs, target, "logarithm").log_loss())
    if plain in ("mse", "rmse", "mae"):
        size: Any = torch.abs if plain == "mae" else torch.square
        errors = lambda outputs, target: (size(_differences(outputs, target)).sum(), target.numel())  # noqa: E731
        return Counted(name, errors, math.sqrt if plain == "rmse" else float)
    if plain == "r2":
        return Gathered(name, _moments, _joined_moments, _r2)
    if plain == "auc":
        scores = lambda outputs, target: votes(outputs, target, "order").ranked()  # noqa: E731
        return Gathered(name, scores, _all_rows, _auc, grows=True)
    return Gathered(
        name, lambda outputs, target: votes(outputs, target).hits(), _added, partial(_ratio, plain)
    )


def _plain_pair(name: str, outputs: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(outputs, torch.Tensor) or not isinstance(target, torch.Tensor):
        raise ConfigError(
            f"the metric {name!r} needs a model with one output and one label.\n"
            "Hint: pass a function of (outputs, targets); it gets all of them."
        )
    return outputs, target


def _class_accuracy(loss: LossRule, outputs: torch.Tensor, target: torch.Tensor) -> Sums:
    """Without a mask if all labels count: a GPU would have to be waited for."""
    target = as_classes(outputs, target)
    guess = outputs.argmax(dim=1)
    if target.is_floating_point():
        return (guess == target.argmax(dim=1)).double().sum(), guess.numel()
    if loss.all_count:
        return (guess == target).sum(), guess.numel()
    kept = target != loss.ignored
    return ((guess == target) & kept).double().sum(), kept.sum()


def _top(name: str, k: int, loss: LossRule | None, outputs: torch.Tensor, target: torch.Tensor) -> Sums:
    votes = votes_of(loss, name, outputs, target)
    if not votes.exclusive:
        raise unclear(name, "the model has one output, so there are no classes to choose from")
    if k > (classes := votes.scores.shape[1]):
        raise ConfigError(
            f"the metric {name!r} asks for the best {k} classes; the model's output has {classes}."
        )
    best = votes.scores.topk(k, dim=1).indices
    return (best == votes.classes[:, None]).double().sum(), len(votes.classes)


def _differences(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if outputs.numel() != target.numel():
        raise ConfigError(
            f"the metrics 'mse', 'rmse', 'mae' and 'r2' need one label value for each output value; outputs"
            f" have shape {tuple(outputs.shape)} and labels {tuple(target.shape)}."
        )
    return (outputs - target.reshape(outputs.shape)).double()


def _moments(outputs: torch.Tensor, target: torch.Tensor) -> State:
    """Rows; for each label column its mean, squared deviations and squared errors."""
    errors = _differences(outputs, target)
    labels = target.reshape(len(outputs), -1).double()
    mean = labels.mean(dim=0)
    spread = (labels - mean).square().sum(dim=0)
    rows = torch.tensor(float(len(labels)), dtype=torch.float64, device=mean.device)
    return rows, mean, spread, errors.reshape(labels.shape).square().sum(dim=0)


def _joined_moments(states: Sequence[State]) -> State:
    """Avoids differences of large sums."""
    rows, means, spreads, errors = (torch.stack(part) for part in zip(*states, strict=True))
    total = rows.sum()
    mean = (rows[:, None] * means).sum(dim=0) / total
    between = (rows[:, None] * (means - mean).square()).sum(dim=0)
    return total, mean, spreads.sum(dim=0) + between, errors.sum(dim=0)


def _r2(state: State) -> float:
    """As in scikit-learn, a constant column gives 1 if met, otherwise 0."""
    rows, _, spread, errors = (part.cpu() for part in state)
    if rows < 2:
        return math.nan
    constant = torch.where(errors == 0, 1.0, 0.0).double()
    return float(torch.where(spread == 0, constant, 1.0 - errors / spread).mean())


def _added(states: Sequence[State]) -> State:
    return tuple(torch.stack(part).sum(dim=0) for part in zip(*states, strict=True))


def _all_rows(states: Sequence[State]) -> State:
    return tuple(torch.cat(part) for part in zip(*states, strict=True))


# The weights of true positives, false positives and false negatives in what true positives are divided by.
_RATIOS = {"precision": (1, 1, 0), "recall": (1, 0, 1), "f1": (2, 1, 1)}


def _ratio(name: str, state: State) -> float:
    """Averaged over the classes that occurred or were predicted."""
    hits = [part.double().cpu() for part in state]
    weighted = [weight * part for weight, part in zip(_RATIOS[name], hits, strict=True)]
    seen, lower = torch.stack(hits).sum(dim=0) > 0, torch.stack(weighted).sum(dim=0)
    ratios = torch.where(lower > 0, weighted[0] / lower.clamp(min=1e-300), torch.zeros_like(lower))
    if len(ratios) == 1:
        return float(ratios[0])
    return float(ratios[seen].mean()) if bool(seen.any()) else math.nan


def _auc(state: State) -> float:
    scores, classes = (part.cpu() for part in state)
    if classes.dim() > 1:  # labels that do not exclude each other
        columns = [(scores[:, place], classes[:, place]) for place in range(scores.shape[1])]
    else:
        columns = [(scores[:, place], classes == place) for place in range(scores.shape[1])]
    areas = [_area(*column) for column in columns]
    known = [area for area in areas if not math.isnan(area)]
    return sum(known) / len(known) if known else math.nan


def _area(scores: torch.Tensor, positive: torch.Tensor) -> float:
    """The share of pairs in which the positive row has the higher score; ties count half."""
    ups = int(positive.sum())
    downs = len(positive) - ups
    if not ups or not downs or bool(torch.isnan(scores).any()):
        return math.nan
    _, place, count = torch.unique(scores, return_inverse=True, return_counts=True)
    ends = count.cumsum(0).double()
    ranks = (ends - (count.double() - 1) / 2)[place]  # equal scores have the mean of their ranks
    return (float(ranks[positive].sum()) - ups * (ups + 1) / 2) / (ups * downs)


@dataclass(frozen=True, slots=True)
class Votes:
    """`classes` are numbers if `exclusive`, otherwise rows of 0 and 1.

    `form` of the scores is "logits", "log" (of probabilities), "probabilities" or "unknown".
    """

    name: str
    scores: torch.Tensor
    classes: torch.Tensor
    exclusive: bool
    form: str
    soft: torch.Tensor | None = None

    def guesses(self) -> torch.Tensor:
        if self.exclusive:
            return self.scores.argmax(dim=1)
        return self.scores > (0.0 if self.form == "logits" else 0.5)

    def accuracy(self) -> tuple[torch.Tensor, int]:
        return (self.guesses() == self.classes).double().sum(), self.classes.numel()

    def hits(self) -> tuple[torch.Tensor, ...]:
        """True positives, false positives and false negatives per class; of two classes, for the second."""
        if self.exclusive:
            size = self.scores.shape[1]
            said, true = F.one_hot(self.guesses(), size).bool(), F.one_hot(self.classes, size).bool()
            if size == 2:  # the second class is the positive one
                said, true = said[:, 1:], true[:, 1:]
        else:
            said, true = self.guesses(), self.classes.bool()
        return (said & true).sum(dim=0), (said & ~true).sum(dim=0), (~said & true).sum(dim=0)

    def ranked(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.exclusive:
            return self.scores, self.classes.bool()
        if self.form == "logits":  # scores of one row are relative to each other
            return torch.softmax(self.scores, dim=1), self.classes
        if self.form == "unknown":
            self._refuse_non_distributions()
        return self.scores, self.classes

    def log_loss(self) -> tuple[torch.Tensor, int]:
        """The sum and the number of values."""
        if not self.exclusive:
            true = self.classes.double()
            if self.form == "logits":
                loss = F.binary_cross_entropy_with_logits(self.scores.double(), true, reduction="sum")
            else:
                loss = F.binary_cross_entropy(self._clipped(), true, reduction="sum")
            return loss, self.classes.numel()
        if self.form == "logits":
            logs = torch.log_softmax(self.scores.double(), dim=1)
        elif self.form == "log":
            logs = self.scores.double()
        else:
            if self.form == "unknown":
                self._refuse_non_distributions()
            logs = self._clipped().log()
        if self.soft is not None:
            return -(logs * self.soft.double()).sum(), len(self.classes)
        return -logs.gather(1, self.classes[:, None]).sum(), len(self.classes)

    def _clipped(self) -> torch.Tensor:
        """As scikit-learn does."""
        small = torch.finfo(self.scores.dtype).eps
        return self.scores.double().clamp(small, 1 - small)

    def _refuse_non_distributions(self) -> None:
        sums = self.scores.sum(dim=1)
        if not bool(((self.scores >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-3)):
            raise unclear(
                self.name,
                "the loss does not say what outputs are, and they are not probabilities that sum to 1",
            )


def votes_of(
    loss: LossRule | None,
    name: str,
    outputs: torch.Tensor,
    target: torch.Tensor,
    use: Literal["order", "cut", "logarithm"] = "cut",
) -> Votes:
    if loss is not None and loss.by_class:
        return _by_class(outputs, target, loss, name)
    if loss is not None and loss.binary:
        return _binary(outputs, target, "logits" if loss.logits else "probabilities", name)
    regression = loss is not None and loss.elementwise  # which is trained to give 0 and 1 themselves
    within = use == "logarithm" or (use == "cut" and not regression)
    return _by_form(outputs, target, name, within=within)


def _by_class(outputs: torch.Tensor, target: torch.Tensor, loss: LossRule, name: str) -> Votes:
    target = as_classes(outputs, target)
    scores = outputs.movedim(1, -1).reshape(-1, outputs.shape[1])
    form = "logits" if loss.logits else "log"
    if target.is_floating_point():
        soft = target.movedim(1, -1).reshape(scores.shape)
        return Votes(name, scores, soft.argmax(dim=1), True, form, soft)
    classes = target.reshape(-1)
    if not loss.all_count:
        kept = classes != loss.ignored
        scores, classes = scores[kept], classes[kept]
    return Votes(name, scores, classes, True, form)


def _binary(outputs: torch.Tensor, target: torch.Tensor, form: str, name: str) -> Votes:
    if outputs.numel() != target.numel():
        raise unclear(name, f"outputs have shape {tuple(outputs.shape)} and labels {tuple(target.shape)}")
    scores = outputs.reshape(len(outputs), -1)
    return Votes(name, scores, (target > 0.5).reshape(scores.shape), False, form)


def _by_form(outputs: torch.Tensor, target: torch.Tensor, name: str, *, within: bool) -> Votes:
    """For losses that do not say: class numbers, one-hot labels, or one output per row and labels 0 and 1."""
    if outputs.dim() > 1 and outputs.shape[1] > 1:
        slim = target.squeeze(1) if target.dim() == outputs.dim() and target.shape[1] == 1 else target
        alike = target.shape == outputs.shape
        if alike and bool(
            ((target == 0) | (target == 1)).all() and (target.sum(dim=1) == 1).all()
        ):  # one-hot
            slim = target.to(torch.uint8).argmax(dim=1)
        if slim.shape != (outputs.shape[0], *outputs.shape[2:]):
            raise unclear(
                name,
                f"outputs of shape {tuple(outputs.shape)} and labels of {tuple(target.shape)}, which are not"
                " one-hot, could be one class of several or several labels",
            )
        flat = outputs.movedim(1, -1).reshape(-1, outputs.shape[1])
        return Votes(name, flat, slim.reshape(-1).long(), True, "unknown")
    if outputs.numel() != target.numel():
        raise unclear(name, f"outputs have shape {tuple(outputs.shape)} and labels {tuple(target.shape)}")
    if not bool(((target == 0) | (target == 1)).all()):
        raise unclear(name, "there are labels other than 0 and 1")
    if within and not bool(((outputs >= 0) & (outputs <= 1)).all()):
        raise unclear(name, "there are outputs outside 0 to 1, and the loss does not say where to cut scores")
    return _binary(outputs, target, "probabilities", name)


def unclear(name: str, why: Any) -> ConfigError:
    return ConfigError(
        f"what {name!r} means is not clear here: {why}.\n"
        "Hint: pass a metric of torchmetrics, or a function of (outputs, targets) that is a mean over rows."
    )
