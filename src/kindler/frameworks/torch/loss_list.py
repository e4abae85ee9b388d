"""One loss for each of several outputs, and their weighted sum.

Each has its own rule (`loss.py`), so ranks sum their divisors before backward, one number each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kindler.errors import ConfigError
from kindler.frameworks.labels import LabelSource
from kindler.frameworks.torch.loss import Judged, LossRule
from kindler.frameworks.torch.named_metrics import Counted

Sums = tuple[torch.Tensor, Any]


def loss_parts(given: Any) -> dict[str, Any] | None:
    """None for a single loss."""
    if isinstance(given, Mapping):
        return {str(name): loss for name, loss in given.items()}
    if isinstance(given, list | tuple):
        return {str(place): loss for place, loss in enumerate(given)}
    return None


def weight_parts(given: Any, names: Sequence[str]) -> dict[str, float]:
    told = given if isinstance(given, Mapping) else dict(zip(names, given or (), strict=False))
    return {name: float(told.get(name, 1.0)) for name in names}


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
        self.sums = self.by_class = self.elementwise = self.binary = self.logits = self.all_count = False
        self.weighted = True
        self.ignored = -100
        self._check = None
        self._rules = {name: LossRule(loss, varying=varying) for name, loss in losses.items()}
        self._weights, self._named, self._labels = dict(weights), named, tuple(labels)
        self._last: dict[str, Sums] = {}
        self.unknown = any(rule.unknown for rule in self._rules.values())

    def unknown_parts(self) -> dict[str, LossRule]:
        return {f"loss[{name!r}]": rule for name, rule in self._rules.items() if rule.unknown}

    def tried(
        self, outputs: Any, targets: tuple[torch.Tensor, ...], rows: int, weights: torch.Tensor | None
    ) -> list[Judged]:
        parts = self._parted(outputs, len(targets)).items()
        return [
            one
            for name, (output, place) in parts
            for one in self._rules[name].tried(output, (targets[place],), rows, weights)
        ]

    def take_part(self, outputs: Any, targets: tuple[torch.Tensor, ...]) -> None:
        for name, (output, place) in self._parted(outputs, len(targets)).items():
            self._rules[name].take_part(output, (targets[place],))

    def metrics(self) -> dict[str, PartLoss]:
        return {self._title(name): PartLoss(self._title(name), self._told(name)) for name in self._rules}

    def _told(self, name: str) -> Callable[[Any, Any], Sums]:
        return lambda outputs, target: self._last[name]

    def _title(self, name: str) -> str:
        return f"{name}_loss" if self._named else f"loss_{name}"

    def combined(self, figures: Mapping[str, float]) -> float:
        return sum(weight * figures[self._title(name)] for name, weight in self._weights.items())

    def idle(self) -> None:
        if self.total_of is not None:
            self.total_of([0.0] * (len(self._rules) + 1))

    def __call__(
        self,
        outputs: Any,
        targets: tuple[torch.Tensor, ...],
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
            found = [outputs[name] for name in names]
        else:
            values = outputs.values() if isinstance(outputs, Mapping) else outputs
            found = [outputs] if isinstance(outputs, torch.Tensor) else list(values)
        if len(found) != len(names):
            raise ConfigError(
                f"there are {len(names)} losses, and the model returns {len(found)} outputs.\n"
                "Hint: a dict of losses by the names of outputs leaves others out, if the model returns a"
                " dict."
            )
        own = set(names) <= set(self._labels)
        places = [self._labels.index(name) if own else place for place, name in enumerate(names)]
        return dict(zip(names, zip(found, places, strict=True), strict=True))
