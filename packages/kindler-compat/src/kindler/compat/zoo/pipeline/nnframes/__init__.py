"""`NNEstimator` and `NNClassifier`, which train a model of BigDL's layers, and the models that score with it.

What trains is Orca's estimator of BigDL models; what scores is a stage of `kindler.ml`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from pyspark.ml import Estimator, Model
from pyspark.ml.param import TypeConverters
from pyspark.ml.param.shared import HasFeaturesCol, HasLabelCol, HasPredictionCol
from torch import nn

from kindler.compat.bigdl.nn import layer as _layers  # noqa: F401 - so that files of them can be read
from kindler.compat.bigdl.nn.files import read_layer, write_layer
from kindler.compat.bigdl.optim.methods import SGD
from kindler.compat.bigdl.optim.summaries import TrainSummary, ValidationSummary
from kindler.compat.bigdl.optim.triggers import MaxEpoch
from kindler.compat.zoo.orca.learn.bigdl import BigDLEstimator
from kindler.compat.zoo.orca.learn.bigdl.shapes import shapes_of
from kindler.errors import ConfigError
from kindler.ml import KindlerModel
from kindler.ml.params import declared
from kindler.ml.persistence import SavedStage

__all__ = ["NNClassifier", "NNClassifierModel", "NNEstimator", "NNModel"]

_MODULE = "kindler.compat.zoo.pipeline.nnframes"


def _setter(name: str) -> Any:
    return lambda stage, value: stage._set(**{name: value})


def _getter(name: str) -> Any:
    return lambda stage: stage.getOrDefault(name)


def _attribute(name: str) -> Any:
    """A setter of an attribute, which returns the stage, and its getter."""

    def change(stage: Any, value: Any) -> Any:
        setattr(stage, name, value)
        return stage

    return change, lambda stage: getattr(stage, name)


class _NNParams(HasFeaturesCol, HasLabelCol, HasPredictionCol):
    batchSize = declared("batchSize", "rows of a step, or of a call of the model", TypeConverters.toInt)
    setFeaturesCol, setPredictionCol = _setter("featuresCol"), _setter("predictionCol")
    setBatchSize, getBatchSize = _setter("batchSize"), _getter("batchSize")


class NNModel(Model, _NNParams, SavedStage):
    """Adds the model's outputs, as arrays of floats. `jvalue` and `bigdl_type` are without effect."""

    _public = f"{_MODULE}.NNModel"
    _prediction_type = "array"

    def __init__(
        self, model: Any, feature_preprocessing: Any = None, jvalue: Any = None, bigdl_type: str = "float"
    ) -> None:
        super().__init__()
        self.model = model
        self.feature_preprocessing = feature_preprocessing
        self._setDefault(batchSize=1)

    def _transform(self, dataset: Any) -> Any:
        estimator = BigDLEstimator(model=self._scoring(), feature_preprocessing=self.feature_preprocessing)
        stage = KindlerModel(
            estimator._core,
            inputCol=self.getFeaturesCol(),
            predictionCol=self.getPredictionCol(),
            predictionType=self._prediction_type,
            predictBatchSize=self.getBatchSize(),
        )
        return stage.transform(dataset)

    def _scoring(self) -> Any:
        return self.model

    def _write_files(self, folder: Path) -> dict[str, Any]:
        write_layer(self.model, folder / "model.bigdl")
        return {"shapes": shapes_of(self.feature_preprocessing, "feature_preprocessing")}

    @classmethod
    def _from_files(cls, folder: Path, facts: dict[str, Any]) -> NNModel:
        return cls(read_layer(folder / "model.bigdl"), facts["shapes"])


class _Labels(nn.Module):
    """The number of a row's largest output, from 1 on; where there is one only, whether it is above 0.5."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: Any) -> torch.Tensor:
        outputs: torch.Tensor = self.model(rows)
        if outputs.shape[-1] == 1:
            return (outputs > 0.5).double()
        return (outputs.argmax(-1, keepdim=True) + 1).double()


class NNClassifierModel(NNModel):
    """Adds a label, as a double: from 1 on, or 0 and 1 for a model with one output."""

    _public = f"{_MODULE}.NNClassifierModel"
    _prediction_type = "auto"

    def _scoring(self) -> Any:
        return _Labels(self.model)


class NNEstimator(Estimator, _NNParams):  # type: ignore[type-arg]
    """Trains a model of BigDL's layers on a DataFrame. The model itself is trained; `copy` copies it."""

    maxEpoch = declared("maxEpoch", "epochs to train", TypeConverters.toInt)
    learningRate = declared("learningRate", "instead of the optimizer's own", TypeConverters.toFloat)
    learningRateDecay = declared(
        "learningRateDecay", "instead of the optimizer's own", TypeConverters.toFloat
    )
    cachingSample = declared("cachingSample", "not needed", TypeConverters.toBoolean)
    _model_class: type[NNModel] = NNModel

    def __init__(
        self,
        model: Any,
        criterion: Any,
        feature_preprocessing: Any = None,
        label_preprocessing: Any = None,
        jvalue: Any = None,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__()
        self.model, self.criterion = model, criterion
        self.feature_preprocessing, self.label_preprocessing = feature_preprocessing, label_preprocessing
        self.train_summary: TrainSummary | None = None
        self.validation_summary: ValidationSummary | None = None
        self.validation_config: list[Any] | None = None
        self._optim_method: Any = SGD()
        self._checkpoint: tuple[str, Any] | None = None
        self._limits: tuple[float, float] | None = None
        self._clip_norm: float | None = None
        self._setDefault(
            maxEpoch=50, learningRate=1e-3, learningRateDecay=0.0, batchSize=1, cachingSample=True
        )

    setLabelCol = _setter("labelCol")
    setMaxEpoch, getMaxEpoch = _setter("maxEpoch"), _getter("maxEpoch")
    setLearningRate, getLearningRate = _setter("learningRate"), _getter("learningRate")
    setLearningRateDecay, getLearningRateDecay = _setter("learningRateDecay"), _getter("learningRateDecay")
    setCachingSample, isCachingSample = _setter("cachingSample"), _getter("cachingSample")

    setOptimMethod, getOptimMethod = _attribute("_optim_method")  # of `bigdl.optim.optimizer`
    setTrainSummary, getTrainSummary = _attribute("train_summary")
    setValidationSummary, getValidationSummary = _attribute("validation_summary")
    setGradientClippingByL2Norm = _attribute("_clip_norm")[0]
    getValidation = _attribute("validation_config")[1]

    def setEndWhen(self, trigger: Any) -> Any:
        """`MaxEpoch(n)`; other triggers are refused."""
        if not isinstance(trigger, MaxEpoch):
            raise ConfigError(f"setEndWhen takes MaxEpoch(n); received {trigger!r}.\nHint: setMaxEpoch(n).")
        return self.setMaxEpoch(trigger.max_epoch)

    def setValidation(self, trigger: Any, val_df: Any, val_method: Any, batch_size: int) -> Any:
        self.validation_config = [trigger, val_df, val_method, batch_size]
        return self

    def setCheckpoint(self, path: str, trigger: Any, isOverWrite: bool = True) -> Any:
        self._checkpoint = (path, trigger)
        return self

    def setConstantGradientClipping(self, min: float, max: float) -> Any:  # noqa: A002 - BigDL's names
        self._limits = (min, max)
        return self

    def clearGradientClipping(self) -> Any:
        self._limits = self._clip_norm = None
        return self

    def copy(self, extra: Any = None) -> Any:
        """Another stage with a model of its own: what a validator or a grid trains."""
        copied = super().copy(extra)
        copied.model, copied._optim_method = copy.deepcopy(self.model), copy.deepcopy(self._optim_method)
        return copied

    def _fit(self, dataset: Any) -> NNModel:
        validation = self.validation_config
        folder, when = self._checkpoint or (None, None)
        estimator = BigDLEstimator(
            model=self.model,
            loss=self.criterion,
            optimizer=self._optimizer(),
            metrics=validation[2] if validation else None,
            feature_preprocessing=self.feature_preprocessing,
            label_preprocessing=self.label_preprocessing,
            model_dir=folder,
        )
        if self._limits is not None:
            estimator.set_constant_gradient_clipping(*self._limits)
        if self._clip_norm is not None:
            estimator.set_l2_norm_gradient_clipping(self._clip_norm)
        estimator._core.train_summary = self.train_summary
        estimator._core.val_summary = self.validation_summary
        estimator.fit(
            dataset,
            self.getMaxEpoch(),
            batch_size=self.getBatchSize(),
            feature_cols=self.getFeaturesCol(),
            label_cols=self.getLabelCol(),
            validation_data=validation[1] if validation else None,
            validation_trigger=validation[0] if validation else None,
            checkpoint_trigger=when,
        )
        return self._copyValues(self._model_class(estimator.get_model(), self.feature_preprocessing))

    def _optimizer(self) -> Any:
        method = copy.deepcopy(self._optim_method)  # whose counters go on through a run
        for param, name in (("learningRate", "learningrate"), ("learningRateDecay", "learningrate_decay")):
            if self.isSet(param):
                if not hasattr(method, name):
                    raise ConfigError(f"{type(method).__name__} has no {param}; set it there.")
                setattr(method, name, self.getOrDefault(param))
        return method


class NNClassifier(NNEstimator):
    """Trains a classifier: labels are numbers from 1 on, as BigDL's criteria have them."""

    _model_class = NNClassifierModel

    def __init__(
        self,
        model: Any,
        criterion: Any,
        feature_preprocessing: Any = None,
        jvalue: Any = None,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(model, criterion, feature_preprocessing)
