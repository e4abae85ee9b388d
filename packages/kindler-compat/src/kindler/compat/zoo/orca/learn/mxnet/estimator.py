"""`zoo.orca.learn.mxnet.Estimator`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kindler.compat.estimators import from_mxnet
from kindler.compat.frameworks.mxnet import create_config
from kindler.compat.zoo.orca.errors import as_orca
from kindler.compat.zoo.orca.learn.base import OrcaEstimator
from kindler.estimator.estimator import Estimator as CoreEstimator

__all__ = ["Estimator", "MXNetEstimator", "create_config"]


class Estimator:
    """Creates estimators of MXNet's models."""

    @staticmethod
    @as_orca
    def from_mxnet(
        *,
        config: Mapping[str, Any],
        model_creator: Callable[..., Any],
        loss_creator: Callable[..., Any] | None = None,
        eval_metrics_creator: Callable[..., Any] | None = None,
        validation_metrics_creator: Callable[..., Any] | None = None,
        num_workers: int | None = None,
        num_servers: int | None = None,
        runner_cores: int | None = None,
    ) -> MXNetEstimator:
        """Create an estimator from a Gluon block. Creators are called with `config`.

        Args:
            config: What `create_config` returns.
            model_creator: Returns a `gluon.Block`.
            loss_creator: Returns a `gluon.loss.Loss`.
            eval_metrics_creator: Returns metrics of training.
            validation_metrics_creator: Returns metrics of validation.
            num_workers: Number of workers; None is one.
            num_servers, runner_cores: Without effect: the workers themselves sum gradients.
        """
        made = from_mxnet(
            CoreEstimator,
            config,
            model_creator,
            loss_creator,
            eval_metrics_creator,
            validation_metrics_creator,
            workers=num_workers or 1,
        )
        return MXNetEstimator(made)


class MXNetEstimator(OrcaEstimator):
    """Trains a Gluon block; also evaluates, scores, saves and loads it, which Orca's could not."""

    def __init__(self, core: CoreEstimator) -> None:
        self._core = core

    @as_orca
    def fit(
        self,
        data: Any,
        epochs: int = 1,
        batch_size: int = 32,
        validation_data: Any = None,
        train_resize_batch_num: int | None = None,
        feature_cols: Any = None,
        label_cols: Any = None,
    ) -> list[dict[str, Any]]:
        """Train; returns the figures of each epoch.

        Args:
            data: An `XShards`, or a function of `(config, kv)` that returns an MXNet iterator or loader.
            epochs: Number of epochs.
            batch_size: Rows of a step of each worker, as in Orca.
            validation_data: Data to judge after each epoch.
            train_resize_batch_num: Steps of an epoch; None is one pass over all rows.
            feature_cols: Columns of shards of DataFrames.
            label_cols: Their columns of labels.
        """
        rows = self._core.fit(
            data,
            epochs=epochs,
            batch_size=batch_size * (self._core.workers or 1),
            steps_per_epoch=train_resize_batch_num,
            validation_data=validation_data,
            feature_cols=feature_cols,
            label_cols=label_cols,
        )
        return [dict(row) for row in rows]

    @as_orca
    def evaluate(
        self, data: Any, batch_size: int = 32, feature_cols: Any = None, label_cols: Any = None
    ) -> Any:
        """The loss and the metrics; every row counts once."""
        return self._core.evaluate(
            data, batch_size=batch_size, feature_cols=feature_cols, label_cols=label_cols
        )

    @as_orca
    def predict(self, data: Any, batch_size: int = 32, feature_cols: Any = None) -> Any:
        """The data with the outputs, as `prediction`."""
        return self._core.predict(data, batch_size=batch_size, feature_cols=feature_cols)

    @as_orca
    def save(self, checkpoint: str) -> str:
        self._core.save(checkpoint)
        return checkpoint

    @as_orca
    def load(self, checkpoint: str) -> None:
        self._core.load_weights(checkpoint)
