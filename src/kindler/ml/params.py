"""The parameters of the stages: what they are called, what they take, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasInputCol, HasInputCols, HasLabelCol, HasPredictionCol

from kindler.data.column_options import ColumnOptions
from kindler.errors import ConfigError
from kindler.ml.scoring import PREDICTION_TYPES, Finish
from kindler.strategies import Strategy
from kindler.train.options import PredictOptions


def _choice(name: str, *choices: str) -> Any:
    def convert(value: Any) -> str:
        if value not in choices:
            raise TypeError(f"{name} must be one of {', '.join(map(repr, choices))}; received {value!r}.")
        return str(value)

    return convert


def _at_least_one(value: Any) -> int:
    number = TypeConverters.toInt(value)
    if isinstance(value, bool) or number < 1:
        raise TypeError(f"expected a whole number of at least 1; received {value!r}.")
    return number


def _positive(value: Any) -> float:
    number = TypeConverters.toFloat(value)
    if not number > 0:
        raise TypeError(f"expected a positive number; received {value!r}.")
    return number


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a dict; received {value!r}.")
    return {str(key): entry for key, entry in value.items()}


def _class_weights(value: Any) -> dict[str, float]:
    return {key: float(weight) for key, weight in _mapping(value).items()}


def _shapes(value: Any) -> dict[str, Any]:
    return {
        key: shape if isinstance(shape, int) else [int(size) for size in shape]
        for key, shape in _mapping(value).items()
    }


def _dtypes(value: Any) -> dict[str, str]:
    import numpy as np

    return {key: str(np.dtype(dtype).name) for key, dtype in _mapping(value).items()}


def _nan(value: Any) -> bool | list[str]:
    return value if isinstance(value, bool) else TypeConverters.toListString(value)


def declared(name: str, doc: str, convert: Any) -> Param[Any]:
    """A parameter of a class of stages."""
    return Param(Params._dummy(), name, doc, typeConverter=convert)


class _Settable(Params):
    """Params that are set by keyword, None leaving one as it is."""

    def setParams(self, **params: Any) -> Any:
        """Set parameters by name; None leaves one as it is."""
        unknown = sorted(name for name in params if not self.hasParam(name))
        if unknown:
            known = ", ".join(param.name for param in self.params)
            raise ConfigError(f"{type(self).__name__} has no parameter {', '.join(unknown)}; it has {known}.")
        return self._set(**{name: value for name, value in params.items() if value is not None})


class PredictParams(_Settable, HasInputCol, HasInputCols, HasPredictionCol):
    """What a stage needs to score a DataFrame."""

    predictionCols: Param[list[str]] = declared(
        "predictionCols",
        "Names of the prediction columns of a model with several outputs, instead of predictionCol.",
        TypeConverters.toListString,
    )
    rawPredictionCol: Param[str] = declared(
        "rawPredictionCol",
        "A second column for the model's outputs as a vector, for evaluators; a single output x is (-x, x).",
        TypeConverters.toString,
    )
    predictionType: Param[str] = declared(
        "predictionType",
        "What predictionCol has. 'auto': one number as a double, several as a vector. 'label': the number of"
        " the largest output, or of a single output whether it reaches threshold, as a double. 'array': the"
        " outputs as Estimator.predict returns them.",
        _choice("predictionType", *PREDICTION_TYPES),
    )
    threshold: Param[float] = declared(
        "threshold", "The value from which a single output is the label 1.", TypeConverters.toFloat
    )
    predictBatchSize: Param[int] = declared(
        "predictBatchSize", "Rows per call of the model when it predicts.", _at_least_one
    )
    stackFeatures: Param[bool] = declared(
        "stackFeatures",
        "Whether to join all input columns into one float32 matrix.",
        TypeConverters.toBoolean,
    )
    shapes: Param[dict[str, Any]] = declared(
        "shapes", "The shape of one row, by column: {'image': (28, 28, 1)}.", _shapes
    )
    dtypes: Param[dict[str, str]] = declared("dtypes", "numpy dtypes, by column.", _dtypes)
    ingest: Param[str] = declared(
        "ingest",
        "How rows reach Python: 'direct' (Python reads the Parquet files), 'inline' (Spark sends them), or"
        " 'auto': direct where the DataFrame is a plain scan of files.",
        _choice("ingest", "auto", "inline", "direct"),
    )

    def _set_predict_defaults(self) -> None:
        self._setDefault(
            predictionCol="prediction",
            predictionType="auto",
            threshold=0.5,
            predictBatchSize=1024,
            ingest="auto",
        )

    def _value(self, name: str) -> Any:
        """The parameter's value; None where it has none."""
        param = self.getParam(name)
        return self.getOrDefault(param) if self.isDefined(param) else None

    def _features(self) -> Any:
        if self.isSet("inputCol") and self.isSet("inputCols"):
            raise ConfigError("inputCol and inputCols are both set; set one of them.")
        return self._value("inputCols") or self._value("inputCol")

    def _outputs(self) -> tuple[str, ...]:
        names = tuple(self._value("predictionCols") or (self._value("predictionCol"),))
        raw = self._value("rawPredictionCol")
        return (*names, raw) if raw else names

    def _vector_columns(self) -> list[str]:
        """The columns whose arrays become vectors."""
        if self._value("predictionType") != "array":
            return [*self._outputs()]
        raw = self._value("rawPredictionCol")
        return [raw] if raw else []

    def _known(self, frame: Any, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """Of what is given by column, what this frame has: it may lack the labels."""
        kept = {name: value for name, value in (given or {}).items() if name in frame.columns}
        return kept or None

    def _predict_options(self, frame: Any) -> PredictOptions:
        return PredictOptions(
            batch_size=self._value("predictBatchSize"),
            columns=ColumnOptions(
                feature_cols=self._features(),
                shapes=self._known(frame, self._value("shapes")),
                dtypes=self._known(frame, self._value("dtypes")),
                stack_features=self._value("stackFeatures"),
                allow_nan=True,
            ),
            ingest=self._value("ingest"),
            verbose=0,
            output_cols=self._outputs(),
            finish=self._finish(),
        )

    def _finish(self) -> Finish:
        return Finish(
            kind=self._value("predictionType"),
            threshold=self._value("threshold"),
            raw=self._value("rawPredictionCol") is not None,
        )

    def setInputCol(self, value: str) -> Any:
        """Set the model's input column."""
        return self._set(inputCol=value)

    def setInputCols(self, value: list[str]) -> Any:
        """Set the model's input columns."""
        return self._set(inputCols=value)

    def setPredictionCol(self, value: str) -> Any:
        """Set the column that the model adds."""
        return self._set(predictionCol=value)


# Parameters whose values `Estimator.fit` takes as they are.
_FIT_OPTIONS = {
    **{name: name for name in ("verbose", "shapes", "dtypes", "shuffle", "ingest")},
    "batchSize": "batch_size",
    "maxSteps": "max_steps",
    "stepsPerEpoch": "steps_per_epoch",
    "weightCol": "sample_weight_col",
}


class FitParams(PredictParams, HasLabelCol):
    """What a stage needs to train, besides."""

    labelCols: Param[list[str]] = declared(
        "labelCols", "The target columns, where there are several.", TypeConverters.toListString
    )
    weightCol: Param[str] = declared(
        "weightCol",
        "A column with the weight of each row (PyTorch and Keras models).",
        TypeConverters.toString,
    )
    validationIndicatorCol: Param[str] = declared(
        "validationIndicatorCol",
        "A boolean column: rows where it is true are for validation after each epoch, not for training.",
        TypeConverters.toString,
    )
    epochs: Param[int] = declared("epochs", "Number of epochs to train.", _at_least_one)
    batchSize: Param[int] = declared("batchSize", "Rows per step, over all workers together.", _at_least_one)
    maxSteps: Param[int] = declared(
        "maxSteps", "Optimizer steps after which training ends, even in the middle of an epoch", _at_least_one
    )
    stepsPerEpoch: Param[int] = declared(
        "stepsPerEpoch", "Steps of an epoch; by default one pass over all rows.", _at_least_one
    )
    learningRate: Param[float] = declared(
        "learningRate", "The optimizer's learning rate, instead of its own.", _positive
    )
    config: Param[dict[str, Any]] = declared(
        "config", "Entries of the estimator's config, which its creators are called with.", _mapping
    )
    shuffle: Param[bool] = declared(
        "shuffle", "Whether each epoch takes the rows in a new order.", TypeConverters.toBoolean
    )
    seed: Param[int] = declared(
        "seed", "Decides initial weights, the order of rows, and dropout.", TypeConverters.toInt
    )
    numWorkers: Param[int] = declared(
        "numWorkers", "Number of workers, instead of the estimator's own.", _at_least_one
    )
    strategy: Param[str] = declared(
        "strategy", "How workers agree: 'allreduce', ...", TypeConverters.toString
    )
    strategyOptions: Param[dict[str, Any]] = declared(
        "strategyOptions", "Options of that strategy.", _mapping
    )
    classWeight: Param[dict[str, float]] = declared(
        "classWeight", "The weight of a row by its label (PyTorch and Keras models).", _class_weights
    )
    allowNan: Param[Any] = declared(
        "allowNan", "Whether NaN is an allowed value: for all columns, or for the ones named.", _nan
    )
    verbose: Param[int] = declared("verbose", "0 shows no progress.", TypeConverters.toInt)
    storeOptions: Param[dict[str, Any]] = declared(
        "storeOptions",
        "How the model is written when the stage is saved: for a PyTorch class of your own,"
        " {'init': {...}} are the arguments that it is made with.",
        _mapping,
    )

    def _set_fit_defaults(self) -> None:
        self._set_predict_defaults()
        self._setDefault(epochs=1, batchSize=32, shuffle=True, strategy="allreduce", verbose=0)

    def _labels(self) -> Any:
        if self.isSet("labelCol") and self.isSet("labelCols"):
            raise ConfigError("labelCol and labelCols are both set; set one of them.")
        return self._value("labelCols") or (self.getLabelCol() if self.isSet("labelCol") else None)

    def _fit_options(self) -> dict[str, Any]:
        """The keyword arguments of `Estimator.fit`."""
        weights = self._value("classWeight")
        return {
            **{option: self._value(name) for name, option in _FIT_OPTIONS.items()},
            "epochs": None if self._value("maxSteps") and not self.isSet("epochs") else self._value("epochs"),
            "feature_cols": self._features(),
            "label_cols": self._labels(),
            "stack_features": bool(self._value("stackFeatures")),
            "allow_nan": self._value("allowNan") or False,
            "strategy": Strategy(self._value("strategy"), **(self._value("strategyOptions") or {})),
            "class_weight": None if weights is None else {int(key): w for key, w in weights.items()},
        }

    def setLabelCol(self, value: str) -> Any:
        """Set the target column."""
        return self._set(labelCol=value)
