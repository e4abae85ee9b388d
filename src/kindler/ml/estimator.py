"""Any Kindler estimator as a stage that trains."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.ml.base import Estimator as SparkEstimator
from pyspark.ml.param import Param
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kindler.errors import ConfigError, NotFittedError
from kindler.estimator.estimator import Estimator
from kindler.ml.model import KindlerModel
from kindler.ml.params import FitParams
from kindler.ml.persistence import SavedStage, is_trusted, read_recipe, write_recipe
from kindler.models.estimator import FrameworkKind
from kindler.models.registry import MODEL_KINDS
from kindler.spark.frames import column

_KIND = "estimator"
_log = logging.getLogger(__name__)


class KindlerEstimator(SparkEstimator[KindlerModel], FitParams, SavedStage):
    """A `kindler.Estimator` as a stage of Spark ML; create it with `est.as_stage(...)`.

    Each `fit` trains a copy of the estimator, so that the folds and grid points of a CrossValidator all start
    from the estimator's weights when the stage was created, independently of one another. Each entry of the
    estimator's `config` is also a parameter of the stage, unless the stage has one of that name.

    Args:
        estimator: The estimator.
        callbacks: Callbacks of every fit. They are not saved with the stage.
        params: The parameters; see `stage.explainParams()`.
    """

    _public = "kindler.ml.KindlerEstimator"

    def __init__(
        self, estimator: Estimator | None = None, *, callbacks: Sequence[Any] = (), **params: Any
    ) -> None:
        super().__init__()
        self._estimator = estimator
        self._callbacks = tuple(callbacks)
        self._config_names = self._declare_config()
        self.setParams(**params)

    @property
    def estimator(self) -> Estimator:
        """The estimator that each fit starts from."""
        if self._estimator is None:
            raise NotFittedError("this stage has no estimator; create it with est.as_stage(...).")
        return self._estimator

    def _declare_config(self) -> tuple[str, ...]:
        config = {} if self._estimator is None else self._estimator.config
        names = [name for name in config if name.isidentifier() and not hasattr(self, name)]
        for name in names:
            setattr(self, name, Param(self, name, f"config[{name!r}], which is passed to creators."))
        self._params = None  # Spark looks for them once
        return tuple(names)

    def _fit(self, dataset: DataFrame) -> KindlerModel:
        estimator = self._trained_on_a_copy(dataset)
        model = KindlerModel(estimator)
        model._resetUid(self.uid)
        model._store_options = self._value("storeOptions") or {}
        return self._copyValues(model)

    def _trained_on_a_copy(self, dataset: DataFrame) -> Estimator:
        base = self.estimator
        lacking = base._model.complaints("train")
        if lacking:
            raise ConfigError(
                f"{self.uid} cannot be fitted: {' '.join(lacking)}\nHint: a stage that was saved with"
                " your own code must be loaded within kindler.ml.trusting()."
            )
        entries = {name: self._value(name) for name in self._config_names if self.isSet(name)}
        estimator = base.copy(
            config={**(self._value("config") or {}), **entries},
            learning_rate=self._value("learningRate"),
            workers=self._value("numWorkers"),
            seed=self._value("seed"),
        )
        parent = self._value("checkpointDir")
        folder = None if parent is None else f"{parent}/{self.uid}-{uuid.uuid4().hex[:8]}"
        training, validation = self._split(dataset)
        estimator.fit(
            training,
            validation_data=validation,
            callbacks=list(self._callbacks),
            checkpoint=folder,
            **self._fit_options(),
        )
        return estimator

    def _split(self, dataset: DataFrame) -> tuple[DataFrame, DataFrame | None]:
        name = self._value("validationIndicatorCol")
        if name is None:
            return dataset, None
        if name not in dataset.columns:
            raise ConfigError(
                f"validationIndicatorCol: there is no column {name!r}; the data has {dataset.columns}."
            )
        marked = F.coalesce(column(name).cast("boolean"), F.lit(False))
        return dataset.filter(~marked), dataset.filter(marked)

    def _write_files(self, folder: Path) -> dict[str, Any]:
        kind = MODEL_KINDS.model_kind(_KIND)
        meta = kind.write(self.estimator, folder, trusted=False, **(self._value("storeOptions") or {}))
        told = _framework_kind(meta).describe_training(self.estimator)
        if not write_recipe(self.estimator, folder) and told is None:
            _log.warning(
                "the training code of %s cannot be pickled; once loaded, it cannot be fitted.", self.uid
            )
        if self._callbacks:
            _log.warning("the callbacks of %s are not saved with it.", self.uid)
        return {"meta": meta, "config": self._json_config(), "training": told}

    def _json_config(self) -> dict[str, Any]:
        """The entries of the config that JSON can have; the others come from the estimator's own code."""
        kept = {}
        for name in self._config_names:
            try:
                kept[name] = json.loads(json.dumps(self.estimator.config[name]))
            except (TypeError, ValueError):
                _log.warning("config[%r] of %s is not saved with it: it is not a JSON value.", name, self.uid)
        return kept

    @classmethod
    def _from_files(cls, folder: Path, facts: dict[str, Any]) -> KindlerEstimator:
        kind = MODEL_KINDS.model_kind(_KIND)
        whole = read_recipe(folder) if is_trusted() else None
        if whole is not None:
            return cls(whole)
        told = facts.get("training")
        known = _framework_kind(facts["meta"]).training_options(told) if told else {}
        options = {"config": facts.get("config") or {}, **known}
        return cls(kind.read(folder, facts["meta"], trusted=is_trusted(), **options))


def _framework_kind(meta: dict[str, Any]) -> FrameworkKind:
    """The kind of the model in a saved estimator; the file may name any."""
    kind = MODEL_KINDS.model_kind(str(meta["model_kind"]))
    if not isinstance(kind, FrameworkKind):
        raise ConfigError(f"an estimator cannot have a model of kind {kind.kind!r}.")
    return kind
