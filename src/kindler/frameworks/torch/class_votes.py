"""Outputs and labels in one form for all class metrics, as the loss or else their shapes and values tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional as F

from kindler.errors import ConfigError
from kindler.frameworks.torch.loss import LossRule, as_classes


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
    outputs: torch.Tensor,
    target: torch.Tensor,
    loss: LossRule | None,
    name: str,
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
        if _is_one_hot(outputs, target):
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


def _is_one_hot(outputs: torch.Tensor, target: torch.Tensor) -> bool:
    if target.shape != outputs.shape:
        return False
    return bool(((target == 0) | (target == 1)).all() and (target.sum(dim=1) == 1).all())


def unclear(name: str, why: Any) -> ConfigError:
    return ConfigError(
        f"what {name!r} means is not clear here: {why}.\n"
        "Hint: pass a metric of torchmetrics, or a function of (outputs, targets) that is a mean over rows."
    )
