"""A trained estimator as a stage that adds predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.ml.base import Model
from pyspark.ml.param.shared import HasLabelCol
from pyspark.sql import DataFrame

from kindler.errors import NotFittedError
from kindler.estimator.estimator import Estimator
from kindler.ml.params import PredictParams
from kindler.ml.persistence import SavedStage, is_trusted
from kindler.ml.scoring import as_vectors
from kindler.models.estimator import EstimatorKind
from kindler.models.registry import MODEL_KINDS
from kindler.train.history import History

_KIND = "estimator"


class KindlerModel(Model, PredictParams, HasLabelCol, SavedStage):
    """A trained model; `transform` adds its predictions, computed where the rows are.

    It keeps all columns and rows of the DataFrame in their order, batch or streaming.
    """

    _public = "kindler.ml.KindlerModel"

    def __init__(self, estimator: Estimator | None = None, **params: Any) -> None:
        super().__init__()
        self._estimator = estimator
        self._store_options: dict[str, Any] = {}
        self._set_predict_defaults()
        self.setParams(**params)

    @property
    def estimator(self) -> Estimator:
        """The trained estimator: to evaluate it, store it, or train on."""
        if self._estimator is None:
            raise NotFittedError("this stage has no model; it is made by fit() or load().")
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
        kind = MODEL_KINDS.model_kind(_KIND)
        model = cls(kind.read(folder, facts["meta"], trusted=is_trusted()))
        model._store_options = kind.put_again(facts["meta"])
        return model
