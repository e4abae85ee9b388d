"""MXNet's metrics over several ranks: each as numbers that can be added up, so that rows count once.

MXNet averages some metrics over batches; here they are averaged over rows, whatever the batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kindler.compat.frameworks.mxnet.library import mx
from kindler.errors import ConfigError

_COUNTS = ("true_positives", "false_positives", "false_negatives", "true_negatives")
_LOSS = "loss"


class MetricTallies:
    """The loss and the metrics of this rank."""

    def __init__(self, training: Sequence[Any], judging: Sequence[Any]) -> None:
        groups = {"train": training, "judge": judging}
        self._metrics = {f"{role} {n}": _tracked(m) for role, ms in groups.items() for n, m in enumerate(ms)}
        self.rows = 0.0
        self.sums: dict[str, list[float]] = {}

    def add(
        self, loss: float, labels: Sequence[Any], outputs: Sequence[Any], rows: int, *, trains: bool
    ) -> None:
        """Count a batch with this mean loss."""
        self.rows += rows
        self._count(_LOSS, [loss * rows, rows])
        for key, metric in self._metrics.items():
            if key.startswith("train" if trains else "judge"):
                self._count(key, metric.counted(labels, outputs, rows))

    def load(self, parts: Sequence[Any]) -> None:
        """Go on from what was counted, by all of these together."""
        self.rows, self.sums = 0.0, {}
        for rows, sums in parts:
            self.rows += rows
            for name, numbers in sums.items():
                self._count(name, numbers)

    def figures(self) -> dict[str, float]:
        total, weight = self.sums.get(_LOSS, [math.nan, 1.0])
        counted = {key: metric for key, metric in self._metrics.items() if key in self.sums}
        results = {metric.name: metric.result(self.sums[key]) for key, metric in counted.items()}
        return {_LOSS: total / weight if weight else math.nan, **results}

    def _count(self, name: str, numbers: Sequence[float]) -> None:
        before = self.sums.setdefault(name, [0.0] * len(numbers))
        self.sums[name] = [a + float(b) for a, b in zip(before, numbers, strict=True)]


class _Mean:
    """A metric that is a sum divided by a number, or a function of that quotient."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self.name = str(metric.name)

    def counted(self, labels: Sequence[Any], outputs: Sequence[Any], rows: int) -> list[float]:
        """The sum and the number of a batch; a mean over the batch counts by its rows."""
        self._metric.reset()
        self._metric.update(list(labels), list(outputs))
        total, number = float(self._metric.sum_metric), float(self._metric.num_inst)
        return [total * rows, float(rows)] if number == 1 and rows > 1 else [total, number]

    def result(self, numbers: Sequence[float]) -> float:
        self._metric.reset()
        self._metric.sum_metric, self._metric.num_inst = numbers
        return float(self._metric.get()[1])


class _RootMeanSquare(_Mean):
    """The root is taken once, of the mean over all rows."""

    def __init__(self, metric: Any) -> None:
        super().__init__(mx.metric.MSE(name=metric.name))

    def result(self, numbers: Sequence[float]) -> float:
        return math.sqrt(super().result(numbers))


class _Confusion:
    """F1 and Matthews' correlation: functions of four counts."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self.name = str(metric.name)
        self._stats = metric.metrics if isinstance(metric, mx.metric.F1) else metric._metrics

    def counted(self, labels: Sequence[Any], outputs: Sequence[Any], rows: int) -> list[float]:
        self._stats.reset_stats()
        for label, output in zip(labels, outputs, strict=True):
            self._stats.update_binary_stats(label, output)
        return [float(getattr(self._stats, name)) for name in _COUNTS]

    def result(self, numbers: Sequence[float]) -> float:
        for name, number in zip(_COUNTS, numbers, strict=True):
            setattr(self._stats, name, number)
        is_f1 = isinstance(self._metric, mx.metric.F1)
        return float(self._stats.fscore if is_f1 else self._stats.matthewscc())


def _tracked(metric: Any) -> Any:
    if isinstance(metric, mx.metric.F1 | mx.metric.MCC):
        return _Confusion(metric)
    if isinstance(metric, mx.metric.RMSE):
        return _RootMeanSquare(metric)
    if isinstance(metric, mx.metric.PearsonCorrelation | mx.metric.PCC):
        raise ConfigError(
            f"{type(metric).__name__} cannot be combined over several workers.\n"
            "Hint: predict() and compute it from the predictions."
        )
    return _Mean(metric)
