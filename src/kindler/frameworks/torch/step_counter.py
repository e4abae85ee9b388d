"""Tallies of what the user's own step logs: means over rows and torchmetrics metrics, merged over ranks."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kindler.frameworks.torch.metrics import Counter, computed_over, load_states, states_of

Number = float | torch.Tensor

# What the history has of every epoch.
_TAKEN = frozenset({"epoch", "steps", "num_samples", "seconds", "rows_per_s"})


class StepCounter(Counter):
    """`rows_seen` and `batches` count since tallies were last taken."""

    def __init__(
        self, metrics: Mapping[str, Any], device: torch.device, metric_at: Callable[[str], Any]
    ) -> None:
        self._sums: dict[str, Number] = {}
        self._weights: dict[str, float] = {}
        self._live: dict[str, str] = {}
        self._newest: set[str] = set()
        self._metric_at = metric_at
        self.rows_seen = self.batches = 0
        super().__init__(metrics, device)

    def begin_batch(self) -> None:
        """Drops the "newest" numbers, those of the previous batch, on all ranks."""
        for name in self._newest:
            self._sums.pop(name, None)
            self._weights.pop(name, None)

    def note(
        self, values: Mapping[str, Number], rows: int, weight: float | None = None, *, newest: bool = False
    ) -> None:
        """`weight` replaces the rows; `newest` keeps only this batch's."""
        by = float(rows if weight is None else weight)
        for given, value in values.items():
            name = f"{given}_2" if given in _TAKEN else given
            more = value.detach().double() * by if isinstance(value, torch.Tensor) else float(value) * by
            self._sums[name] = self._sums.get(name, 0.0) + more
            self._weights[name] = self._weights.get(name, 0.0) + by
            if newest:
                self._newest.add(name)

    def mark(self) -> Callable[[], None]:
        """The returned function goes back to this point."""
        sums, weights, live = dict(self._sums), dict(self._weights), dict(self._live)

        def go_back() -> None:
            self._sums, self._weights, self._live = sums, weights, live

        return go_back

    def count_rows(self, rows: int) -> None:
        self.rows_seen += rows
        self.batches += 1

    def weight_of(self, name: str) -> float:
        return self._weights.get(name, 0.0)

    def note_metric(self, name: str, path: str) -> None:
        self._live[name] = path

    def running_loss(self) -> float:
        loss, weight = self.loss_sums()
        return loss / weight if weight else math.nan

    def loss_sums(self) -> tuple[float, float]:
        if "loss" not in self._sums:
            return super().loss_sums()
        return float(self._sums["loss"]), self._weights["loss"]

    def running_metrics(self) -> dict[str, float]:
        own = {
            name: float(total) / self._weights[name]
            for name, total in self._sums.items()
            if name != "loss" and self._weights[name]
        }
        return super().running_metrics() | own

    def keep(self) -> dict[str, Any]:
        return {**super().keep(), "step": self._kept()}

    def _kept(self) -> dict[str, Any]:
        return {
            "rows": self.rows_seen,
            "batches": self.batches,
            "sums": {name: float(total) for name, total in self._sums.items()},
            "weights": dict(self._weights),
            "paths": dict(self._live),
            "states": {name: states_of(self._metric_at(path)) for name, path in self._live.items()},
        }

    def take(self) -> bytes:
        data = io.BytesIO()
        kept = self._kept()
        torch.save({"step": kept, "rest": super().take()}, data)  # which begins to count anew
        return data.getvalue()

    def restore(self, tallies: Mapping[str, Any]) -> None:
        super().restore(tallies)
        self._go_on([tallies["step"]])

    def restore_all(self, parts: Sequence[Mapping[str, Any]]) -> None:
        super().restore_all([{**part, "step": parts[0]["step"]} for part in parts])
        self._go_on([part["step"] for part in parts])

    def _go_on(self, kept: Sequence[Mapping[str, Any]]) -> None:
        self.rows_seen = sum(part["rows"] for part in kept)
        self.batches = max(part["batches"] for part in kept)
        self._sums, self._weights = dict(_added(kept, "sums")), _added(kept, "weights")
        self._live = {name: path for part in kept for name, path in part["paths"].items()}
        for name, path in self._live.items():
            states = [part["states"][name] for part in kept if name in part["states"]]
            load_states(self._metric_at(path), states, self._device)

    def merge(self, tallies: Sequence[bytes]) -> dict[str, float]:
        parts = [torch.load(io.BytesIO(data), map_location="cpu", weights_only=True) for data in tallies]
        kept = [part["step"] for part in parts]
        rows = sum(part["rows"] for part in kept)
        if not rows:
            return super().merge([part["rest"] for part in parts])
        sums, weights = _added(kept, "sums"), _added(kept, "weights")
        merged = {"loss": math.nan}
        merged |= {name: sums[name] / weights[name] if weights[name] else math.nan for name in sums}
        for name, path in {n: p for part in kept for n, p in part["paths"].items()}.items():
            states = [part["states"][name] for part in kept if name in part["states"]]
            merged |= computed_over(name, self._metric_at(path), states)
        merged["num_samples"] = rows
        return merged

    def _clear(self) -> None:
        super()._clear()
        for path in self._live.values():
            self._metric_at(path).reset()
        self._sums, self._weights, self._live = {}, {}, {}
        self.rows_seen = self.batches = 0


def _added(parts: Sequence[Mapping[str, Any]], key: str) -> dict[str, float]:
    added: dict[str, float] = {}
    for part in parts:
        for name, value in part[key].items():
            added[name] = added.get(name, 0.0) + float(value)
    return added
