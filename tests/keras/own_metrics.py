"""A model of one number with metrics of a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from problems import library


def metrics_of(keras: Any) -> dict[str, Any]:
    """Metrics by what they are: mergeable ones, and others."""
    maximum = keras.ops.maximum if hasattr(keras, "ops") else keras.backend.maximum
    largest = keras.ops.max if hasattr(keras, "ops") else keras.backend.max
    mean = keras.ops.mean if hasattr(keras, "ops") else keras.backend.mean

    class Last(keras.metrics.Metric):  # type: ignore[misc]
        """The largest error of the last batch: nothing that can be merged."""

        def __init__(self, name: str) -> None:
            super().__init__(name=name)
            self.value = self.add_weight(shape=(), initializer="zeros", name="value")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.value.assign(largest(abs(y_true - y_pred)))

        def result(self) -> Any:
            return self.value + 0.0

    class Peak(Last):
        """The largest error of all, which it does not say."""

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.value.assign(maximum(self.value + 0.0, largest(abs(y_true - y_pred))))

    class Told(Peak):
        merge_over_workers: ClassVar[dict[str, str]] = {"value": "max"}

    class Wrong(Peak):
        merge_over_workers: ClassVar[dict[str, str]] = {"value": "median"}

    class Mean(keras.metrics.Mean):  # type: ignore[misc]
        """A mean of the user's own, on top of that of Keras."""

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            super().update_state(abs(y_true - y_pred))

    def by_row(y_true: Any, y_pred: Any) -> Any:
        return mean(abs(y_true - y_pred), axis=-1)

    def by_batch(y_true: Any, y_pred: Any) -> Any:
        return largest(abs(y_true - y_pred))

    classes = {"last": Last, "peak": Peak, "told": Told, "wrong": Wrong, "mean": Mean}
    return {"by_row": by_row, "by_batch": by_batch, **{name: made(name) for name, made in classes.items()}}


def model(config: Mapping[str, Any]) -> Any:
    """The sum of its inputs, judged by the metrics that `config` names."""
    keras = library(config)
    known = metrics_of(keras)
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    made.compile(optimizer="sgd", loss="mse", metrics=[known[name] for name in config["metrics"]])
    return made
