"""`zoo.orca.learn.bigdl`: a model of BigDL's layers on Spark DataFrames and XShards."""

from __future__ import annotations

import os
import warnings
from typing import Any

from torch import nn

from kindler.compat.bigdl.nn import layer as _layers  # noqa: F401 - so that files of them can be read
from kindler.compat.bigdl.nn.base import regularized
from kindler.compat.bigdl.nn.files import read_layer, write_layer
from kindler.compat.bigdl.optim.methods import OptimMethod
from kindler.compat.bigdl.optim.rules_torch import TorchRule, refuse_regularizers, torch_metrics
from kindler.compat.bigdl.optim.triggers import EveryEpoch, Trigger
from kindler.compat.bigdl.optim.validation import Scores, named_all
from kindler.compat.zoo.orca import InvalidInputError
from kindler.compat.zoo.orca.learn.base import TorchEstimator, strategy_of, workers_of
from kindler.compat.zoo.orca.learn.bigdl.shapes import ShapedModel, joined_labels, shapes_of
from kindler.compat.zoo.tfpark.training import TFParkEstimator
from kindler.data.arrays import is_spark_frame

__all__ = ["BigDLEstimator", "Estimator"]


class Estimator(TorchEstimator):
    """Made by `from_bigdl`. The model may be any torch module, the optimizer also one of torch.

    `feature_preprocessing` is the shape of a row, a list of shapes for several inputs, or `SeqToTensor` and
    the like; labels take the shape that the loss needs.
    """

    def __init__(
        self,
        *,
        model: Any,
        loss: Any = None,
        optimizer: Any = None,
        metrics: Any = None,
        feature_preprocessing: Any = None,
        label_preprocessing: Any = None,
        model_dir: Any = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidInputError(f"model must be one of bigdl.nn.layer; received {model!r}.")
        self.model, self.loss, self.optimizer, self.model_dir = model, loss, optimizer, model_dir
        self.metrics = named_all(metrics)
        self.feature_preprocessing, self.label_preprocessing = feature_preprocessing, label_preprocessing
        super().__init__()

    @staticmethod
    def from_bigdl(*, model: Any, **options: Any) -> Estimator:
        return Estimator(model=model, **options)

    def fit(
        self,
        data: Any,
        epochs: int,
        batch_size: int = 32,
        feature_cols: Any = "features",
        label_cols: Any = "label",
        caching_sample: bool = True,
        validation_data: Any = None,
        validation_trigger: Any = None,
        checkpoint_trigger: Any = None,
    ) -> Estimator:
        """Train; `caching_sample` and `validation_trigger` are without effect.

        For XShards, and after `load_orca_checkpoint`, `epochs` counts from when the model was new.
        Several `feature_cols` become one vector, unless the model has several inputs; so do `label_cols`.
        """
        done, _ = self._core.counters
        more = epochs - done if self._loaded or not is_spark_frame(data) else epochs
        if more < 1:
            warnings.warn(
                f"nothing is trained: epochs={epochs} counts from when the model was created, and {done} "
                "epochs are done.",
                stacklevel=3,
            )
            return self
        trigger = _trigger(checkpoint_trigger, "checkpoint_trigger")
        if not isinstance(_trigger(validation_trigger, "validation_trigger"), EveryEpoch | None):
            warnings.warn("validation_trigger: validation is after each epoch.", stacklevel=3)
        options: dict[str, Any] = {"strategy": strategy_of("bigdl", divide=self._divide())}
        if trigger is not None:
            options |= {"checkpoint_trigger": trigger, "keep_checkpoints": None}
        data, label = joined_labels(data, label_cols)
        checked = None if validation_data is None else joined_labels(validation_data, label_cols)[0]
        columns = self._columns(data, feature_cols, label)
        self._core.fit(
            data, epochs=more, batch_size=batch_size, validation_data=checked, **columns, **options
        )
        self._core.get_model()
        if isinstance(self.optimizer, OptimMethod):
            epoch, step = self._core.counters
            self.optimizer.state.update(epoch=epoch + 1, neval=step + 1)
        return self

    def predict(
        self, data: Any, batch_size: int = 4, feature_cols: Any = "features", sample_preprocessing: Any = None
    ) -> Any:
        """`sample_preprocessing` is the shape of a row, instead of `feature_preprocessing`."""
        core = self._core
        if sample_preprocessing is not None:
            shapes = shapes_of(sample_preprocessing, "sample_preprocessing")
            core = self._make(**self._clipping, shapes=shapes)
        return core.predict(data, batch_size=batch_size, **self._columns(data, feature_cols, None))

    def evaluate(
        self, data: Any, batch_size: int = 32, feature_cols: Any = "features", label_cols: Any = "label"
    ) -> Scores:
        """The metrics by BigDL's names, as {"Top1Accuracy": ...}; every row counts once."""
        if not self.metrics:
            raise InvalidInputError("evaluate needs metrics.\nHint: from_bigdl(metrics=[Accuracy()]).")
        data, label = joined_labels(data, label_cols)
        columns = self._columns(data, feature_cols, label)
        scores = self._core.evaluate(data, batch_size=batch_size, verbose=0, **columns)
        tags = [method.tag for method in self.metrics]
        return Scores({tag: scores[tag if tag in scores else "loss"] for tag in tags})

    def get_model(self) -> Any:
        self._core.get_model()
        return self.model

    def save(self, model_path: str) -> None:
        """Write the model to `model_path + ".bigdl"`; reading it runs no code of the file."""
        write_layer(self.get_model(), _file(model_path))

    def load(
        self,
        checkpoint: str,
        optimizer: Any = None,
        loss: Any = None,
        feature_preprocessing: Any = None,
        label_preprocessing: Any = None,
        model_dir: Any = None,
        is_checkpoint: bool = False,
    ) -> Estimator:
        """Go on with a model that `save` wrote, or with `is_checkpoint` from the newest of a folder.

        Options of `from_bigdl` that are not passed stay.
        """
        changes = {
            "optimizer": optimizer,
            "loss": loss,
            "feature_preprocessing": feature_preprocessing,
            "label_preprocessing": label_preprocessing,
            "model_dir": model_dir,
        }
        vars(self).update({name: value for name, value in changes.items() if value is not None})
        if not is_checkpoint:
            self.model = read_layer(_file(checkpoint))
        before, self._core = self._core, self._make(**self._clipping)
        self._core.train_summary, self._core.val_summary = before.train_summary, before.val_summary
        return self.load_orca_checkpoint(checkpoint) if is_checkpoint else self

    def load_orca_checkpoint(self, path: Any, version: int | None = None, prefix: Any = None) -> Estimator:
        super().load_orca_checkpoint(path, version)
        self._core.get_model()
        return self

    def _make(self, *, clip_norm: Any, limits: Any, **shaped: Any) -> TFParkEstimator:
        shapes_of(self.label_preprocessing, "label_preprocessing")
        optimizer = self.optimizer
        if isinstance(optimizer, OptimMethod):
            optimizer = TorchRule(optimizer, limits)
        elif optimizer is not None:
            if limits is not None:
                raise InvalidInputError(
                    "set_constant_gradient_clipping needs an optimizer of bigdl.optim.optimizer, such as"
                    " Adam()."
                )
            refuse_regularizers(self.model)
        core = TFParkEstimator.from_torch(
            model=ShapedModel(self.model, shaped.get("shapes", self._shapes())),
            loss=self.loss,
            optimizer=optimizer,
            metrics=torch_metrics(self.metrics, self.loss) or None,
            clip_norm=clip_norm,
            model_dir=self.model_dir,
            workers=workers_of(1),
        )
        assert isinstance(core, TFParkEstimator)
        return core

    def _shapes(self) -> Any:
        return shapes_of(self.feature_preprocessing, "feature_preprocessing")

    def _divide(self) -> str | None:
        """What the optimizer's work can be divided into; regularizers know whole parameters only."""
        whole = any(True for _ in regularized(self.model))
        return None if whole or not isinstance(self.optimizer, OptimMethod) else "elements"

    def _columns(self, data: Any, features: Any, labels: Any) -> dict[str, Any]:
        if not is_spark_frame(data):
            chosen = {"feature_cols": (features, "features"), "label_cols": (labels, "label")}
            return {name: value for name, (value, default) in chosen.items() if value not in (default, None)}
        several = [features] if isinstance(features, str) else list(features)
        shapes = self._shapes()
        joined = len(several) > 1 and (shapes is None or len(shapes) == 1)
        columns: dict[str, Any] = {"feature_cols": several, "stack_features": joined}
        if labels is not None:
            columns["label_cols"] = [labels] if isinstance(labels, str) else list(labels)
        return columns


BigDLEstimator = Estimator


def _file(path: str) -> str:
    name = os.fspath(path)
    return name if name.endswith(".bigdl") else f"{name}.bigdl"


def _trigger(trigger: Any, argument: str) -> Trigger | None:
    if trigger is None or isinstance(trigger, Trigger):
        return trigger
    if trigger == "EveryEpoch":
        return EveryEpoch()
    raise InvalidInputError(f"{argument} must be a trigger of orca.learn.trigger; received {trigger!r}.")
