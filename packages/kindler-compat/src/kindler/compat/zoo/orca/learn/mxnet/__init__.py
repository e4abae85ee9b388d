"""`zoo.orca.learn.mxnet`: Gluon blocks of MXNet; also evaluates, scores, saves and loads, unlike Orca's."""

from __future__ import annotations

from typing import Any

from kindler.compat.estimators import create_config, from_mxnet
from kindler.compat.flat import FlatEstimator as CoreEstimator
from kindler.compat.zoo.orca.learn.base import OrcaEstimator

__all__ = ["Estimator", "MXNetEstimator", "create_config"]


class Estimator(OrcaEstimator):
    """Made by `from_mxnet`. `fit` and `evaluate` also take functions of `(config, kv)`."""

    def __init__(self, core: CoreEstimator) -> None:
        self._core = core

    @staticmethod
    def from_mxnet(
        *,
        config: Any,
        model_creator: Any,
        loss_creator: Any = None,
        eval_metrics_creator: Any = None,
        validation_metrics_creator: Any = None,
        num_workers: int | None = None,
        num_servers: int | None = None,
        runner_cores: int | None = None,
    ) -> Estimator:
        """`num_servers` and `runner_cores` are without effect: the workers themselves sum gradients."""
        metrics = eval_metrics_creator, validation_metrics_creator
        workers = num_workers or 1
        made = from_mxnet(CoreEstimator, config, model_creator, loss_creator, *metrics, workers=workers)
        assert isinstance(made, CoreEstimator)
        return Estimator(made)

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
        """Returns the figures of each epoch. `batch_size` is of each worker, as in Orca."""
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

    def evaluate(
        self, data: Any, batch_size: int = 32, feature_cols: Any = None, label_cols: Any = None
    ) -> Any:
        return self._core.evaluate(
            data, batch_size=batch_size, feature_cols=feature_cols, label_cols=label_cols
        )

    def predict(self, data: Any, batch_size: int = 32, feature_cols: Any = None) -> Any:
        return self._core.predict(data, batch_size=batch_size, feature_cols=feature_cols)

    def save(self, checkpoint: str) -> str:
        self._core.save(checkpoint)
        return checkpoint

    def load(self, checkpoint: str) -> None:
        self._core.load_weights(checkpoint)


MXNetEstimator = Estimator
