"""Losses of several parts, and those that the model computes itself.

One loss for each of several outputs: each has its own rule (`loss.py`), so ranks sum their divisors before
backward, one number each. `loss="model"` is a mean over the integer labels other than -100 (without the first
of each row if the model predicts the next token), otherwise over rows; `loss_divisor(outputs, inputs)` of the
model overrides it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kindler.errors import ConfigError
from kindler.frameworks.labels import LabelSource
from kindler.frameworks.torch.adapters import called
from kindler.frameworks.torch.loss import Judged, LossRule, Tensors
from kindler.frameworks.torch.named_metrics import Counted, Sums
from kindler.frameworks.torch.outputs import flat, own_loss, without_loss

_IGNORED = -100
_LABELS = ("labels", "label")
_NEXT_TOKEN = re.compile(r"(ForCausalLM|LMHeadModel)$")

Inputs = Mapping[str, torch.Tensor]


def loss_parts(given: Any) -> dict[str, Any] | None:
    """None for a single loss."""
    if isinstance(given, Mapping):
        return {str(name): loss for name, loss in given.items()}
    if isinstance(given, list | tuple):
        return {str(place): loss for place, loss in enumerate(given)}
    return None


def weight_parts(given: Any, names: Sequence[str]) -> dict[str, float]:
    weights = given if isinstance(given, Mapping) else dict(zip(names, given or (), strict=False))
    return {name: float(weights.get(name, 1.0)) for name in names}


class PartLoss(Counted):
    def __call__(self, outputs: Any, target: Any) -> Sums:
        counted: Sums = self.measure(outputs, target)
        return counted


class LossList(LossRule):
    """`total_of` sums numbers over all ranks of a step; None if each rank steps by itself."""

    total_of: Callable[[list[float]], list[float]] | None = None

    def __init__(
        self,
        losses: Mapping[str, Any],
        weights: Mapping[str, float],
        *,
        named: bool,
        labels: Sequence[str] = (),
        varying: bool = False,
    ) -> None:
        self.function: Any = None
        self._rules = {name: LossRule(loss, varying=varying) for name, loss in losses.items()}
        self._weights, self._named, self._labels = dict(weights), named, tuple(labels)
        self._last: dict[str, Sums] = {}
        self.unknown = any(rule.unknown for rule in self._rules.values())

    def unknown_parts(self) -> dict[str, LossRule]:
        return {f"loss[{name!r}]": rule for name, rule in self._rules.items() if rule.unknown}

    def tried(self, outputs: Any, targets: Tensors, rows: int, weights: torch.Tensor | None) -> list[Judged]:
        parts = self._parted(outputs, len(targets)).items()
        return [
            one
            for name, (output, place) in parts
            for one in self._rules[name].tried(output, (targets[place],), rows, weights)
        ]

    def take_part(self, outputs: Any, targets: Tensors) -> None:
        for name, (output, place) in self._parted(outputs, len(targets)).items():
            self._rules[name].take_part(output, (targets[place],))

    def metrics(self) -> dict[str, PartLoss]:
        last = {name: lambda outputs, target, name=name: self._last[name] for name in self._rules}
        return {self._title(name): PartLoss(self._title(name), measure) for name, measure in last.items()}

    def _title(self, name: str) -> str:
        return f"{name}_loss" if self._named else f"loss_{name}"

    def combined(self, figures: Mapping[str, float]) -> float:
        """The loss itself where a step of the user's own has computed it."""
        if not all(self._title(name) in figures for name in self._weights):
            return figures["loss"]
        return sum(weight * figures[self._title(name)] for name, weight in self._weights.items())

    def idle(self) -> None:
        if self.total_of is not None:
            self.total_of([0.0] * (len(self._rules) + 1))

    def __call__(
        self,
        outputs: Any,
        targets: Tensors,
        rows: int,
        source: LabelSource | None = None,
        weights: torch.Tensor | None = None,
    ) -> Judged:
        parts = self._parted(outputs, len(targets))
        judged: dict[str, Judged] = {}
        for name, (output, place) in parts.items():
            seen = None
            if source is not None:
                called = source.names[place : place + 1]
                seen = LabelSource(source.arrays[place : place + 1], called, source.where)
            judged[name] = self._rules[name](output, (targets[place],), rows, seen, weights)
        self._last = {name: (one.total, one.weight) for name, one in judged.items()}
        own = [float(one.weight) for one in judged.values()]
        shared = self.total_of is not None and torch.is_grad_enabled()
        divisors, all_rows = own, float(rows)
        if shared and self.total_of is not None:
            *divisors, all_rows = self.total_of([*own, float(rows)])
        loss = torch.zeros((), device=next(iter(judged.values())).loss.device)
        for (name, one), divisor in zip(judged.items(), divisors, strict=True):
            whole = one.loss if one.scale == 1.0 else one.loss * one.scale
            by = 1.0 if self._rules[name].sums else divisor
            loss = loss + whole * (self._weights[name] / by if by else 0.0)
        # What the others do with rows then leaves this rank's share as it is.
        return Judged(loss * (all_rows / rows), float(rows), float(rows))

    def _parted(self, outputs: Any, labels: int) -> dict[str, tuple[Any, int]]:
        names = list(self._rules)
        if labels != len(names):
            raise ConfigError(
                f"there are {len(names)} losses, and {labels} label columns; each needs its own."
            )
        by_key = self._named and isinstance(outputs, Mapping)
        if by_key:
            missing = [name for name in names if name not in outputs]
            if missing:
                raise ConfigError(
                    f"loss[{missing[0]!r}]: the model returns no output of that name, only"
                    f" {', '.join(map(repr, outputs))}."
                )
            parts = [outputs[name] for name in names]
        else:
            values = outputs.values() if isinstance(outputs, Mapping) else outputs
            parts = [outputs] if isinstance(outputs, torch.Tensor) else list(values)
        if len(parts) != len(names):
            raise ConfigError(
                f"there are {len(names)} losses, and the model returns {len(parts)} outputs.\n"
                "Hint: a dict of losses by the names of outputs leaves others out, if the model returns a"
                " dict."
            )
        own = set(names) <= set(self._labels)
        places = [self._labels.index(name) if own else place for place, name in enumerate(names)]
        return dict(zip(names, zip(parts, places, strict=True), strict=True))


def label_arguments(
    model: torch.nn.Module, names: Sequence[str], features: Sequence[str] = ()
) -> tuple[str, ...]:
    """A single label may also be passed as "labels"."""
    try:
        taken = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return tuple(names)
    if len(names) == 1 and names[0] not in taken and _LABELS[0] in taken and _LABELS[0] not in features:
        return (_LABELS[0],)
    return tuple(names)


class ModelLoss(LossRule):
    def __init__(self, model: torch.nn.Module, labels: Sequence[str] = ()) -> None:
        self.function = "model"
        self._labels = tuple(labels)
        self._divisor_of: Callable[..., Any] | None = getattr(model, "loss_divisor", None)
        self._next_token = any(_NEXT_TOKEN.search(cls.__name__) for cls in type(called(model)).__mro__)

    @property
    def declared(self) -> bool:
        return self._divisor_of is not None

    def judge(self, outputs: Any, inputs: Inputs, rows: int) -> Judged:
        loss = own_loss(outputs)
        if loss is None:
            raise ConfigError(
                "loss='model': the model returned no loss for the inputs"
                f" {', '.join(map(repr, inputs))}; it must return a dict or an object with a scalar 'loss'.\n"
                "Hint: models compute it if they get labels: pass the column with label_cols=..., under the"
                " name that the model's forward takes it by (a single one is passed as 'labels' too)."
            )
        divisor = self.divisor(outputs, inputs, rows)
        if not divisor:  # 0/0: nothing of this batch counts
            rest = [part.float().sum() for part in flat(without_loss(outputs)) if part.is_floating_point()]
            loss = torch.stack(rest).nan_to_num().sum() * 0.0 if rest else torch.zeros_like(loss)
        return Judged(
            loss.reshape(()), divisor, divisor, opaque=not self.declared and not self._counts(inputs)
        )

    def divisor(self, outputs: Any, inputs: Inputs, rows: int) -> float:
        """Up to a factor common to all batches."""
        if self._divisor_of is not None:
            return float(self._divisor_of(outputs, inputs))
        labels = self._counts(inputs)
        if not labels:
            return float(rows)
        [label] = labels
        return float(self._kept(label).sum().item())

    def differ(self, inputs: Inputs) -> bool:
        """Only rows that count differently make a trial conclusive."""
        return any(int(kept.min()) != int(kept.max()) for kept in map(self._per_row, self._counts(inputs)))

    def tried_rows(self, inputs: Inputs, rows: int) -> list[int]:
        """Those that count least and most."""
        chosen = list(range(rows))
        for label in self._counts(inputs):
            per_row = self._per_row(label)
            chosen = [row for row in per_row.argsort().tolist() if per_row[row] > 0]
        return [*chosen[:2], *chosen[2:][-2:]]

    def for_metrics(self, outputs: Any, targets: Sequence[torch.Tensor], inputs: Inputs) -> tuple[Any, Any]:
        """Compares "logits" or the only output with the labels that are not ignored."""
        outputs = without_loss(outputs)
        targets = tuple(targets) or tuple(inputs[name] for name in _LABELS if name in inputs)
        if isinstance(outputs, Mapping):
            tensors = [value for value in outputs.values() if isinstance(value, torch.Tensor)]
            outputs = outputs.get("logits", tensors[0] if len(tensors) == 1 else outputs)
        if len(targets) == 1 and isinstance(outputs, torch.Tensor) and not targets[0].is_floating_point():
            return self._counted(outputs, targets[0])
        return outputs, targets

    def _counted(self, outputs: torch.Tensor, target: torch.Tensor) -> tuple[Any, Any]:
        if outputs.shape[:-1] != target.shape or outputs.dim() < 2:
            return outputs, (target,)
        if self._next_token and target.dim() > 1:
            outputs, target = outputs[:, :-1], target[:, 1:]
        kept = target != _IGNORED
        return outputs[kept], (target[kept],)

    def _counts(self, inputs: Inputs) -> list[torch.Tensor]:
        """Empty if rows are counted."""
        labels = [inputs[name] for name in self._labels or _LABELS if name in inputs]
        return labels if len(labels) == 1 and not labels[0].is_floating_point() and labels[0].dim() else []

    def _kept(self, label: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = label != _IGNORED
        return kept[:, 1:] if self._next_token and kept.dim() > 1 else kept

    def _per_row(self, label: torch.Tensor) -> torch.Tensor:
        kept = self._kept(label)
        return (
            kept.reshape(len(kept), -1).sum(1)
            if kept.numel()
            else kept.new_zeros(len(kept), dtype=torch.int64)
        )
