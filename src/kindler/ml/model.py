"""Stages that add predictions: trained estimators, files, models in memory, and models of a store.

What a model is, how its files are checked and how it is called is known by its kind, see `kindler.models`.
Models of PyTorch and Keras become a `KindlerModel`, all others a `PretrainedModel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow.types import is_nested
from pyspark.ml.base import Model
from pyspark.ml.param import TypeConverters
from pyspark.ml.param.shared import HasLabelCol
from pyspark.sql import DataFrame

from kindler.data.batches import inputs
from kindler.data.columns import ColumnPlan
from kindler.errors import ConfigError, NotFittedError
from kindler.estimator.estimator import Estimator
from kindler.estimator.inputs.contract import zeros
from kindler.estimator.inputs.spark import FrameInput
from kindler.inference.outputs import to_arrow
from kindler.ml.params import PredictParams, Row
from kindler.ml.persistence import SavedStage, is_trusted
from kindler.ml.scoring import ModelFiles, Scorer, as_vectors
from kindler.models.estimator import EstimatorKind, FrameworkKind
from kindler.models.loaded import load_files
from kindler.models.registry import MODEL_KINDS
from kindler.temporary import Folder
from kindler.train.history import History

Array = np.ndarray[Any, Any]


class KindlerModel(Model, PredictParams, HasLabelCol, SavedStage):
    """A trained model; `transform` adds its predictions, computed on the executors.

    It keeps all columns and rows of the DataFrame in their order, batch or streaming.
    """

    _public = "kindler.ml.KindlerModel"

    def __init__(self, estimator: Estimator | None = None, **params: Any) -> None:
        super().__init__()
        self._estimator = estimator
        self._store_options: dict[str, Any] = {}
        self.setParams(**params)

    @property
    def estimator(self) -> Estimator:
        """The trained estimator, to evaluate, store, or train it further."""
        if self._estimator is None:
            raise NotFittedError("this stage has no model; create it with fit() or load().")
        return self._estimator

    @property
    def history(self) -> History:
        """The rows of the training history."""
        return self.estimator.history

    def _transform(self, dataset: DataFrame) -> DataFrame:
        scored: DataFrame = self.estimator._predict_with(dataset, self._predict_options(dataset))
        return as_vectors(scored, self._vector_columns())

    def _write_files(self, folder: Path) -> dict[str, Any]:
        kind = EstimatorKind()
        options = {**kind.to_predict(self.estimator), **self._store_options}
        return {"meta": kind.write(self.estimator, folder, trusted=False, **options)}

    @classmethod
    def _from_files(cls, folder: Path, facts: dict[str, Any]) -> KindlerModel:
        kind = MODEL_KINDS.model_kind("estimator")
        model = cls(kind.read(folder, facts["meta"], trusted=is_trusted()))
        model._store_options = kind.put_again(facts["meta"])
        return model


def pretrained(
    model: Any, *, shelf: Any = None, trusted: bool = False, **params: Any
) -> KindlerModel | PretrainedModel:
    """Create a stage from a model that is already trained.

    Args:
        model: A model in memory (Keras, PyTorch, scikit-learn, ONNX), a trained `kindler.Estimator`, or the
            path of a model: a `.keras` file, the folder of a SavedModel, an `.onnx` or OpenVINO `.xml` file,
            a `.pt2` program. With `shelf`, a name in it, such as "digits@prod".
        shelf: The models of a store: `store.models`.
        trusted: Whether reading the model may run code that comes with it.
        params: Parameters of the stage, such as `inputCol` and `predictionCol`.

    Raises:
        ConfigError: Kindler does not support this model.
        UntrustedError: The model is code, and `trusted` was not passed.
    """
    if shelf is not None:
        version = shelf.metadata(model)
        with shelf.store.files(version) as folder:
            return _of_files(version.kind, version.meta, folder, trusted=trusted, params=params)
    if isinstance(model, Estimator):
        return KindlerModel(model.copy(), **params)
    if isinstance(model, str | PathLike):
        model = Path(model)
    kind = MODEL_KINDS.kind_of(model)
    if isinstance(kind, FrameworkKind) and not isinstance(model, Path):
        return KindlerModel(kind.estimator(model=model).copy(), **params)
    with Folder("kindler-pretrained-") as folder:
        meta = kind.write(model, folder, trusted=trusted)
        return _of_files(kind.kind, meta, folder, trusted=trusted, params=params)


def _of_files(
    kind: str, meta: Mapping[str, Any], folder: Path, *, trusted: bool, params: Mapping[str, Any]
) -> KindlerModel | PretrainedModel:
    loaded = load_files(kind, folder, meta, trusted=trusted)  # what cannot be read is rejected here
    if isinstance(loaded.model, Estimator):
        return KindlerModel(loaded.model, **params)
    if isinstance(loaded.kind, FrameworkKind) and meta.get("form") != "program":
        return KindlerModel(loaded.kind.estimator(model=loaded.model), **params)
    return PretrainedModel(ModelFiles.read(kind, meta, folder, trusted=trusted), **params)


class PretrainedModel(Model, PredictParams, SavedStage):
    """A model that was trained elsewhere; create it with `kindler.ml.pretrained(...)`."""

    _public = "kindler.ml.PretrainedModel"

    modelOutputs = Row(TypeConverters.toListString, "The model's outputs to use; by default all.")
    modelMethod = Row(
        TypeConverters.toString,
        "The method to call: 'predict'; for some kinds also 'predict_proba' or 'transform'.",
        "predict",
    )

    def __init__(self, model: ModelFiles | None = None, **params: Any) -> None:
        super().__init__()
        self._model = model
        self.setParams(**params)

    @property
    def model(self) -> ModelFiles:
        """The model's files, and its kind."""
        if self._model is None:
            raise NotFittedError("this stage has no model; create it with kindler.ml.pretrained(...).")
        return self._model

    def _transform(self, dataset: DataFrame) -> DataFrame:
        options, frame = self._predict_options(dataset), FrameInput(dataset)
        columns, types = frame.plan(replace(options.columns, need_labels=False, label_cols=[]))
        scorer = Scorer(
            model=self.model,
            columns=columns,
            batch_size=options.batch_size,
            method=self._value("modelMethod"),
            chosen=tuple(self._value("modelOutputs") or ()),
            finish=self._finish(),
        )
        # How wide a row of vectors is does not show in its type; of numbers it does.
        nested = {name for name, kind in types.items() if kind is not None and is_nested(kind)}
        wide = {name: known for name, known in self._layout(columns).items() if name in nested}
        sample = zeros(columns, wide, types) or frame.first_row(columns)
        outputs = next(scorer.score([inputs(columns, sample)]))
        names = self._outputs()
        if len(names) != len(outputs):
            raise ConfigError(
                f"the model has {len(outputs)} outputs, but the stage names the columns {list(names)}.\n"
                "Hint: name all of them with predictionCols, or choose with modelOutputs."
            )
        kinds = [to_arrow(output).type for output in outputs]
        return as_vectors(frame.scored(scorer, names, kinds), self._vector_columns())

    def _layout(self, columns: ColumnPlan) -> dict[str, Any]:
        """dtype and row shape of the columns, where the model's inputs say them."""
        specs = self.model.predictor().signature.inputs
        if len(specs) != len(columns.features):
            return {}
        by_name = {spec.name: spec for spec in specs}
        named = all(one.name in by_name for one in columns.features)
        pairs = [
            (one.name, by_name[one.name] if named else spec)
            for one, spec in zip(columns.features, specs, strict=True)
        ]
        return {
            name: (spec.dtype, spec.shape[1:])
            for name, spec in pairs
            if spec.shape is not None and spec.dtype not in (None, "object") and None not in spec.shape[1:]
        }

    def _write_files(self, folder: Path) -> dict[str, Any]:
        self.model.write(folder)
        return {"kind": self.model.kind, "meta": dict(self.model.meta)}

    @classmethod
    def _from_files(cls, folder: Path, facts: dict[str, Any]) -> PretrainedModel:
        kind, meta, trusted = str(facts["kind"]), facts["meta"], is_trusted()
        load_files(kind, folder, meta, trusted=trusted)  # refuses here, not on an executor
        return cls(ModelFiles.read(kind, meta, folder, trusted=trusted))
