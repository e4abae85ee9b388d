"""Metrics with a name; batches merge exactly into one value.

What a class metric means follows from the loss, which knows the form of outputs and labels; if unknown, it is
refused, since a wrong guess would be a plausible number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kindler.errors import ConfigError, did_you_mean
from kindler.frameworks.torch.class_votes import unclear, votes_of
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
        return Counted(name, _top(name, int(top[1]), loss))
    if plain not in NAMES:
        raise ConfigError(unknown_name(name))
    if plain == "accuracy":
        return Counted(name, _accuracy_for(name, loss))
    if plain == "log_loss":
        logs = lambda outputs, target: votes_of(outputs, target, loss, name, "logarithm").log_loss()  # noqa: E731
        return Counted(name, logs)
    if plain == "rmse":
        return Counted(name, _mse, math.sqrt)
    if plain in ("mse", "mae"):
        return Counted(name, _mse if plain == "mse" else _mae)
    if plain == "r2":
        return Gathered(name, _moments, _joined_moments, _r2)
    if plain == "auc":
        scores = lambda outputs, target: votes_of(outputs, target, loss, name, "order").ranked()  # noqa: E731
        return Gathered(name, scores, _all_rows, _auc, grows=True)
    hits = lambda outputs, target: votes_of(outputs, target, loss, name).hits()  # noqa: E731
    return Gathered(name, hits, _added, _RATIOS[plain])


def _plain_pair(name: str, outputs: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(outputs, torch.Tensor) or not isinstance(target, torch.Tensor):
        raise ConfigError(
            f"the metric {name!r} needs a model with one output and one label.\n"
            "Hint: pass a function of (outputs, targets); it gets all of them."
        )
    return outputs, target


def _accuracy_for(name: str, loss: LossRule | None) -> Measure:
    if loss is not None and loss.by_class:  # without a mask, which a GPU would have to be waited for
        return lambda outputs, target: _by_class(outputs, target, None if loss.all_count else loss.ignored)
    return lambda outputs, target: votes_of(outputs, target, loss, name).accuracy()


def _by_class(outputs: torch.Tensor, target: torch.Tensor, ignored: int | None) -> Sums:
    target = as_classes(outputs, target)
    guess = outputs.argmax(dim=1)
    if target.is_floating_point():
        return (guess == target.argmax(dim=1)).double().sum(), guess.numel()
    if ignored is None:
        return (guess == target).sum(), guess.numel()
    kept = target != ignored
    return ((guess == target) & kept).double().sum(), kept.sum()


def _top(name: str, k: int, loss: LossRule | None) -> Measure:
    def measure(outputs: torch.Tensor, target: torch.Tensor) -> Sums:
        votes = votes_of(outputs, target, loss, name)
        if not votes.exclusive:
            raise unclear(name, "the model has one output, so there are no classes to choose from")
        classes = votes.scores.shape[1]
        if k > classes:
            raise ConfigError(
                f"the metric {name!r} asks for the best {k} classes; the model's output has {classes}."
            )
        best = votes.scores.topk(k, dim=1).indices
        return (best == votes.classes[:, None]).double().sum(), len(votes.classes)

    return measure


def _mse(outputs: torch.Tensor, target: torch.Tensor) -> Sums:
    return _differences(outputs, target).square().sum(), target.numel()


def _mae(outputs: torch.Tensor, target: torch.Tensor) -> Sums:
    return _differences(outputs, target).abs().sum(), target.numel()


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


def _ratio(state: State, above: Callable[..., Any], below: Callable[..., Any]) -> float:
    """Averaged over the classes that occurred or were predicted."""
    right, false, missed = (part.double().cpu() for part in state)
    seen = (right + false + missed) > 0
    upper, lower = above(right, false, missed), below(right, false, missed)
    ratios = torch.where(lower > 0, upper / lower.clamp(min=1e-300), torch.zeros_like(lower))
    if len(ratios) == 1:
        return float(ratios[0])
    return float(ratios[seen].mean()) if bool(seen.any()) else math.nan


def _precision(state: State) -> float:
    return _ratio(state, lambda right, false, missed: right, lambda right, false, missed: right + false)


def _recall(state: State) -> float:
    return _ratio(state, lambda right, false, missed: right, lambda right, false, missed: right + missed)


def _f1(state: State) -> float:
    return _ratio(
        state, lambda right, false, missed: 2 * right, lambda right, false, missed: 2 * right + false + missed
    )


_RATIOS = {"precision": _precision, "recall": _recall, "f1": _f1}


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
