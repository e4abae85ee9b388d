"""An estimator that keeps what each worker reported of its last run, for `reduce_results=False`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kindler.compat.zoo.tfpark.training import TFParkEstimator
from kindler.estimator.run import RunObserver
from kindler.train.options import EvaluateOptions, FitOptions

__all__ = ["ReportingEstimator", "Reports"]


class Reports(RunObserver):
    """What workers reported of a run: figures of each, and losses of their steps."""

    def __init__(self) -> None:
        self._figures: dict[tuple[str, int], dict[int, Mapping[str, Any]]] = {}
        self._losses: dict[int, dict[int, tuple[float, float]]] = {}
        self._last_steps: dict[int, int] = {}

    def hear(self, fields: Mapping[str, Any]) -> None:
        """Keep a report."""
        if fields["name"] == "worker":
            key = (fields["part"], int(fields["epoch"]))
            self._figures.setdefault(key, {})[int(fields["rank"])] = fields["figures"]
        elif fields["name"] == "steps":
            own = self._losses.setdefault(int(fields["rank"]), {})
            pairs = zip(fields["loss"], fields["rows"], strict=True)
            own.update({fields["first"] + place: pair for place, pair in enumerate(pairs)})
        elif fields["name"] == "epoch":
            self._last_steps[int(fields["row"]["epoch"])] = int(fields["step"])

    def last_loss(self, row: Mapping[str, Any], rank: int | None = None) -> float | None:
        """The loss of the last step of an epoch, of all workers or of one; None where it is not known."""
        step = self._last_steps.get(row["epoch"])
        ranks = self._losses if rank is None else {rank: self._losses.get(rank, {})}
        parts = [own[step] for own in ranks.values() if step in own]
        weight = sum(rows for _, rows in parts)
        return sum(loss * rows for loss, rows in parts) / weight if weight else None

    def by_worker(self, row: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
        """The figures of an epoch, as rows of the history, of each worker."""
        trained = self._figures.get(("train", row["epoch"]), {})
        judged = self._figures.get(("validation", row["epoch"]), {})
        for rank in sorted(trained):
            own = {"epoch": row["epoch"], "steps": row["steps"], **trained[rank]}
            yield rank, own | {f"val_{name}": value for name, value in judged.get(rank, {}).items()}

    def judged(self) -> list[Mapping[str, Any]]:
        """The figures of an evaluation, of each worker."""
        (found,) = [ranks for (part, _), ranks in self._figures.items() if part == "validation"]
        return [found[rank] for rank in sorted(found)]


class ReportingEstimator(TFParkEstimator):
    """Keeps the reports of its last run."""

    reports: Reports

    def observers(self, options: FitOptions | EvaluateOptions) -> Sequence[RunObserver]:
        """The reports, anew for each run."""
        self.reports = Reports()
        return [*super().observers(options), self.reports]
