"""`zoo.orca.learn.bigdl.Estimator`: a model of BigDL's layers on Spark DataFrames and XShards."""

from __future__ import annotations

import os
import warnings
from os import PathLike
from typing import Any

from torch import nn

from kindler.compat.bigdl.nn import layer as _layers  # noqa: F401 - so that files of them can be read
from kindler.compat.bigdl.nn.base import regularized
from kindler.compat.bigdl.nn.files import read_layer, write_layer
from kindler.compat.bigdl.optim.methods import OptimMethod
from kindler.compat.bigdl.optim.rules_torch import TorchRule, refuse_regularizers, torch_metrics
from kindler.compat.bigdl.optim.triggers import EveryEpoch
from kindler.compat.bigdl.optim.validation import Scores, named_all
from kindler.compat.zoo.orca.errors import InvalidInput, as_orca
from kindler.compat.zoo.orca.learn.base import SparkEstimator, sync_of, workers_of
from kindler.compat.zoo.orca.learn.bigdl.shapes import ShapedModel, joined_labels, shapes_of
from kindler.compat.zoo.tfpark.training import TFParkEstimator
from kindler.data.arrays import is_spark_frame
from kindler.train.triggers import Trigger

__all__ = ["BigDLEstimator", "Estimator"]


class Estimator:
    """Creates estimators of BigDL's models."""

    @staticmethod
    @as_orca
    def from_bigdl(*, model: Any, **options: Any) -> BigDLEstimator:
        """Create an estimator from a model of `bigdl.nn.layer`; see `BigDLEstimator` for the options."""
        return BigDLEstimator(model=model, **options)


class BigDLEstimator(SparkEstimator):
    """Trains, evaluates and scores a model of BigDL's layers. Made by `Estimator.from_bigdl`.

    Args:
        model: The model; any torch module works as well.
        loss: A criterion of `bigdl.nn.criterion`.
        optimizer: An optimizer of `bigdl.optim.optimizer`, or of torch.
        metrics: Validation methods, such as `Top1Accuracy()` or those of `orca.learn.metrics`.
        feature_preprocessing: The shape of a row, a list of shapes for several inputs, or `SeqToTensor` and
            the like.
        label_preprocessing: The shape of a label; labels take the shape that the loss needs anyway.
        model_dir: A folder for checkpoints.
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
        model_dir: str | PathLike[str] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidInput(f"model must be one of bigdl.nn.layer; received {model!r}.")
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.metrics = named_all(metrics)
        self.feature_preprocessing, self.label_preprocessing = feature_preprocessing, label_preprocessing
        self.model_dir = model_dir
        self._clip_norm: float | None = None
        self._limits: tuple[float, float] | None = None
        self._loaded = False
        self._core = self._make()

    @as_orca
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
    ) -> BigDLEstimator:
        """Train; see `OrcaEstimator` for the arguments of data.

        Args:
            data: The rows.
            epochs: How many epochs to train. For XShards, and after `load_orca_checkpoint`, the number of
                epochs since the model was new, as in Orca.
            batch_size: Rows of a step over all workers.
            feature_cols: Several become one vector, unless `feature_preprocessing` says that the model has
                several inputs.
            label_cols: Several become one vector, as in Orca.
            validation_data: Data of the same kind.
            checkpoint_trigger: When a checkpoint is written to `model_dir`.
            caching_sample, validation_trigger: Without effect.
        """
        done, _ = self._core.counters
        total = self._loaded or not is_spark_frame(data)
        more = epochs - done if total else epochs
        if more < 1:
            warnings.warn(
                f"nothing is trained: epochs={epochs} counts from when the model was new, and {done} epochs"
                " are made.",
                stacklevel=3,
            )
            return self
        trigger = _trigger(checkpoint_trigger, "checkpoint_trigger")
        if not isinstance(_trigger(validation_trigger, "validation_trigger"), EveryEpoch | None):
            warnings.warn("validation_trigger: validation is after each epoch.", stacklevel=3)
        options: dict[str, Any] = {}
        if trigger is not None:
            options = {"checkpoint_trigger": trigger, "keep_checkpoints": None}
        data, label = joined_labels(data, label_cols)
        checked = None if validation_data is None else joined_labels(validation_data, label_cols)[0]
        self._core.fit(
            data,
            epochs=more,
            batch_size=batch_size,
            validation_data=checked,
            **self._columns(data, feature_cols, label),
            **options,
            **sync_of("bigdl", divide=self._divide()),
        )
        self._core.get_model()
        if isinstance(self.optimizer, OptimMethod):
            epoch, step = self._core.counters
            self.optimizer.state.update(epoch=epoch + 1, neval=step + 1)
        return self

    @as_orca
    def predict(
        self,
        data: Any,
        batch_size: int = 4,
        feature_cols: Any = "features",
        sample_preprocessing: Any = None,
    ) -> Any:
        """The data with the outputs, as `prediction`.

        `sample_preprocessing` is the shape of a row, instead of `feature_preprocessing`.
        """
        core = self._core
        if sample_preprocessing is not None:
            core = self._make(shapes=shapes_of(sample_preprocessing, "sample_preprocessing"))
        return core.predict(data, batch_size=batch_size, **self._columns(data, feature_cols, None))

    @as_orca
    def evaluate(
        self, data: Any, batch_size: int = 32, feature_cols: Any = "features", label_cols: Any = "label"
    ) -> Scores:
        """The metrics by BigDL's names, as {"Top1Accuracy": ...}; every row counts once."""
        if not self.metrics:
            raise InvalidInput("evaluate needs metrics.\nHint: from_bigdl(metrics=[Accuracy()]).")
        data, label = joined_labels(data, label_cols)
        columns = self._columns(data, feature_cols, label)
        scores = self._core.evaluate(data, batch_size=batch_size, verbose=0, **columns)
        tags = [method.tag for method in self.metrics]
        return Scores({tag: scores[tag if tag in scores else "loss"] for tag in tags})

    def get_model(self) -> Any:
        self._core.get_model()
        return self.model

    @as_orca
    def save(self, model_path: str) -> None:
        """Write the model to `model_path + ".bigdl"`; reading it runs no code of the file."""
        write_layer(self.get_model(), _file(model_path))

    @as_orca
    def load(
        self,
        checkpoint: str,
        optimizer: Any = None,
        loss: Any = None,
        feature_preprocessing: Any = None,
        label_preprocessing: Any = None,
        model_dir: str | PathLike[str] | None = None,
        is_checkpoint: bool = False,
    ) -> BigDLEstimator:
        """Go on with a model that `save` wrote; options of `from_bigdl` that are not passed stay.

        Args:
            checkpoint: What `save` was called with; with `is_checkpoint`, a folder of checkpoints.
            is_checkpoint: Whether to go on from the newest checkpoint of a run.
        """
        self.optimizer = self.optimizer if optimizer is None else optimizer
        self.loss = self.loss if loss is None else loss
        if feature_preprocessing is not None:
            self.feature_preprocessing = feature_preprocessing
        if label_preprocessing is not None:
            self.label_preprocessing = label_preprocessing
        self.model_dir = self.model_dir if model_dir is None else model_dir
        if not is_checkpoint:
            self.model = read_layer(_file(checkpoint))
        self._core = self._make()
        return self.load_orca_checkpoint(checkpoint) if is_checkpoint else self

    def load_orca_checkpoint(
        self, path: str | PathLike[str], version: int | None = None, prefix: str | None = None
    ) -> BigDLEstimator:
        super().load_orca_checkpoint(path, version)
        self._core.get_model()
        self._loaded = True
        return self

    def clear_gradient_clipping(self) -> None:
        """Do not clip gradients any more."""
        self._clip_norm = self._limits = None
        self._rebuild()

    def set_constant_gradient_clipping(self, min: float, max: float) -> None:  # noqa: A002 - Orca's names
        """Clip every element of a gradient between two limits."""
        if not min < max:
            raise InvalidInput(f"set_constant_gradient_clipping: {min} is not below {max}.")
        self._limits = (float(min), float(max))
        self._rebuild()

    def set_l2_norm_gradient_clipping(self, clip_norm: float) -> None:
        """Clip the gradient of all parameters together to a norm."""
        if not clip_norm > 0:
            raise InvalidInput(
                f"set_l2_norm_gradient_clipping: the norm must be above 0; received {clip_norm}."
            )
        self._clip_norm = float(clip_norm)
        self._rebuild()

    def _make(self, **shaped: Any) -> TFParkEstimator:
        shapes_of(self.label_preprocessing, "label_preprocessing")
        shapes = shaped.get("shapes", shapes_of(self.feature_preprocessing, "feature_preprocessing"))
        core = TFParkEstimator.from_torch(
            model=ShapedModel(self.model, shapes),
            loss=self.loss,
            optimizer=self._optimizer(),
            metrics=torch_metrics(self.metrics, self.loss) or None,
            clip_norm=self._clip_norm,
            model_dir=self.model_dir,
            workers=workers_of(1),
        )
        assert isinstance(core, TFParkEstimator)
        if hasattr(self, "_core"):
            core.train_summary, core.val_summary = self._core.train_summary, self._core.val_summary
        return core

    def _optimizer(self) -> Any:
        if isinstance(self.optimizer, OptimMethod):
            return TorchRule(self.optimizer, self._limits)
        if self.optimizer is not None and self._limits is not None:
            raise InvalidInput(
                "set_constant_gradient_clipping needs an optimizer of bigdl.optim.optimizer, such as Adam()."
            )
        if self.optimizer is not None:
            refuse_regularizers(self.model)
        return self.optimizer

    def _divide(self) -> str | None:
        """What the optimizer's work can be divided into; regularizers know whole parameters only."""
        whole = any(True for _ in regularized(self.model))
        return None if whole or not isinstance(self.optimizer, OptimMethod) else "elements"

    def _rebuild(self) -> None:
        """Another estimator of the same model that goes on from where this one is."""
        before, self._core = self._core, self._make()
        self._core.continue_from(before)

    def _columns(self, data: Any, features: Any, labels: Any) -> dict[str, Any]:
        if not is_spark_frame(data):
            chosen = {"feature_cols": (features, "features"), "label_cols": (labels, "label")}
            return {name: value for name, (value, default) in chosen.items() if value not in (default, None)}
        several = [features] if isinstance(features, str) else list(features)
        shapes = shapes_of(self.feature_preprocessing, "feature_preprocessing")
        joined = len(several) > 1 and (shapes is None or len(shapes) == 1)
        columns: dict[str, Any] = {"feature_cols": several, "stack_features": joined}
        if labels is not None:
            columns["label_cols"] = [labels] if isinstance(labels, str) else list(labels)
        return columns


def _file(path: str) -> str:
    name = os.fspath(path)
    return name if name.endswith(".bigdl") else f"{name}.bigdl"


def _trigger(trigger: Any, argument: str) -> Trigger | None:
    if trigger is None or isinstance(trigger, Trigger):
        return trigger
    if trigger == "EveryEpoch":
        return EveryEpoch()
    raise InvalidInput(f"{argument} must be a trigger of orca.learn.trigger; received {trigger!r}.")
