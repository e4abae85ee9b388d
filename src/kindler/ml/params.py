"""The parameters of the stages: what they are called, what they take, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasInputCol, HasInputCols, HasLabelCol, HasPredictionCol

from kindler.data.column_options import ColumnOptions
from kindler.errors import ConfigError
from kindler.estimator.groups import grouped
from kindler.ml.scoring import PREDICTION_TYPES, Finish
from kindler.strategies import Strategy
from kindler.train.options import PredictOptions

_T = TypeVar("_T")


def _choice(*choices: str) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if value not in choices:
            raise TypeError(f"expected one of {', '.join(map(repr, choices))}; received {value!r}.")
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


def _by_name(convert: Callable[[Any], _T]) -> Callable[[Any], dict[str, _T]]:
    def convert_all(value: Any) -> dict[str, _T]:
        if not isinstance(value, Mapping):
            raise TypeError(f"expected a dict; received {value!r}.")
        return {str(key): convert(entry) for key, entry in value.items()}

    return convert_all


def _as_is(value: Any) -> Any:
    return value


def _shape(value: Any) -> int | list[int]:
    return value if isinstance(value, int) else [int(size) for size in value]


def _dtype(value: Any) -> str:
    import numpy as np

    return str(np.dtype(value).name)


def _nan(value: Any) -> bool | list[str]:
    return value if isinstance(value, bool) else TypeConverters.toListString(value)


def declared(name: str, doc: str, convert: Any) -> Param[Any]:
    return Param(Params._dummy(), name, doc, typeConverter=convert)


class Row(Param[_T]):
    """A parameter of a class of stages, named like the attribute; None is no default."""

    def __init__(self, convert: Callable[[Any], _T], doc: str, default: Any = None) -> None:
        super().__init__(Params._dummy(), "", doc, typeConverter=convert)
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name


class _Settable(Params):
    """Params that are set by keyword, None leaving one as it is."""

    def __init__(self) -> None:
        super().__init__()
        rows = [param for param in self.params if isinstance(param, Row)]
        self._setDefault(**{row.name: row.default for row in rows if row.default is not None})

    def setParams(self, **params: Any) -> Any:
        """Set parameters by name; None leaves one as it is."""
        unknown = sorted(name for name in params if not self.hasParam(name))
        if unknown:
            known = ", ".join(param.name for param in self.params)
            raise ConfigError(f"{type(self).__name__} has no parameter {', '.join(unknown)}; it has {known}.")
        return self._set(**{name: value for name, value in params.items() if value is not None})


class PredictParams(_Settable, HasInputCol, HasInputCols, HasPredictionCol):
    """What a stage needs to score a DataFrame."""

    predictionCols = Row(
        TypeConverters.toListString,
        "Names of the prediction columns of a model with several outputs, instead of predictionCol.",
    )
    rawPredictionCol = Row(
        TypeConverters.toString,
        "A second column for the model's outputs as a vector, for evaluators; a single output x is (-x, x).",
    )
    predictionType = Row(
        _choice(*PREDICTION_TYPES),
        "What predictionCol contains. 'auto': one number as a double, several as a vector. 'label': the"
        " index of the largest output, or whether a single output reaches threshold, as a double. 'array':"
        " the"
        " outputs as Estimator.predict returns them.",
        "auto",
    )
    threshold = Row(TypeConverters.toFloat, "The value from which on a single output is the label 1.", 0.5)
    predictBatchSize = Row(_at_least_one, "Rows per model call during prediction.", 1024)
    stackFeatures = Row(
        TypeConverters.toBoolean, "Whether to join all input columns into one float32 matrix."
    )
    shapes = Row(_by_name(_shape), "The shape of one row, by column: {'image': (28, 28, 1)}.")
    dtypes = Row(_by_name(_dtype), "numpy dtypes, by column.")
    ingest = Row(
        _choice("auto", "inline", "direct"),
        "How rows reach Python: 'direct' (Python reads the Parquet files), 'inline' (Spark sends them), or"
        " 'auto': direct if the DataFrame is a plain scan of files.",
        "auto",
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

    def _by_column(self, name: str, frame: Any) -> dict[str, Any] | None:
        """A parameter's entries for the columns of this frame, which may lack the labels."""
        entries = {
            column: value for column, value in (self._value(name) or {}).items() if column in frame.columns
        }
        return entries or None

    def _predict_options(self, frame: Any) -> PredictOptions:
        return PredictOptions(
            batch_size=self._value("predictBatchSize"),
            columns=ColumnOptions(
                feature_cols=self._features(),
                shapes=self._by_column("shapes", frame),
                dtypes=self._by_column("dtypes", frame),
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
    "weightCol": "weight_col",
}


class FitParams(PredictParams, HasLabelCol):
    """What a stage needs to train, besides."""

    labelCols = Row(TypeConverters.toListString, "The target columns, if there are several.")
    weightCol = Row(
        TypeConverters.toString, "A column with the weight of each row (PyTorch and Keras models)."
    )
    validationIndicatorCol = Row(
        TypeConverters.toString,
        "A boolean column: rows where it is true are for validation after each epoch, not for training.",
    )
    epochs = Row(_at_least_one, "Number of epochs to train.", 1)
    batchSize = Row(_at_least_one, "Rows per step, over all workers together.", 32)
    maxSteps = Row(
        _at_least_one, "Optimizer steps after which training ends, even in the middle of an epoch."
    )
    stepsPerEpoch = Row(_at_least_one, "Steps of an epoch; by default one pass over all rows.")
    checkpointDir = Row(
        TypeConverters.toString, "A folder in which each fit writes checkpoints to its own subfolder."
    )
    learningRate = Row(_positive, "The learning rate, instead of the optimizer's own.")
    config = Row(_by_name(_as_is), "Entries of the estimator's config, which is passed to its creators.")
    shuffle = Row(TypeConverters.toBoolean, "Whether each epoch shuffles the rows.", True)
    seed = Row(TypeConverters.toInt, "The seed of initial weights, the order of rows, and dropout.")
    numWorkers = Row(_at_least_one, "Number of workers, instead of the estimator's own.")
    strategy = Row(TypeConverters.toString, "How workers synchronize: 'allreduce', ...", "allreduce")
    strategyOptions = Row(_by_name(_as_is), "Options of that strategy.")
    classWeight = Row(_by_name(float), "The weight of a row by its label (PyTorch and Keras models).")
    allowNan = Row(_nan, "Whether NaN is allowed: in all columns, or in those listed.")
    verbose = Row(TypeConverters.toInt, "0 shows no progress.", 0)
    storeOptions = Row(
        _by_name(_as_is),
        "How the model is written when the stage is saved: for a PyTorch class of your own,"
        " {'init': {...}} are its constructor's arguments.",
    )

    def _labels(self) -> Any:
        if self.isSet("labelCol") and self.isSet("labelCols"):
            raise ConfigError("labelCol and labelCols are both set; set one of them.")
        return self._value("labelCols") or (self.getLabelCol() if self.isSet("labelCol") else None)

    def _fit_options(self) -> dict[str, Any]:
        """The keyword arguments of `Estimator.fit`."""
        weights = self._value("classWeight")
        flat = {
            **{option: self._value(name) for name, option in _FIT_OPTIONS.items()},
            "epochs": None if self._value("maxSteps") and not self.isSet("epochs") else self._value("epochs"),
            "feature_cols": self._features(),
            "label_cols": self._labels(),
            "stack_features": bool(self._value("stackFeatures")),
            "allow_nan": self._value("allowNan") or False,
            "strategy": Strategy(self._value("strategy"), **(self._value("strategyOptions") or {})),
            "class_weight": None if weights is None else {int(key): w for key, w in weights.items()},
        }
        return grouped(flat)

    def setLabelCol(self, value: str) -> Any:
        """Set the target column."""
        return self._set(labelCol=value)
