"""Outputs of a model as the columns that Spark ML expects: numbers as doubles, several as a vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, NumericType

from kindler.errors import ConfigError
from kindler.spark.frames import column

PREDICTION_TYPES = ("auto", "label", "array")

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Makes columns of outputs; travels to the executors.

    Attributes:
        kind: One of `PREDICTION_TYPES`.
        threshold: The value from which a single output is the label 1.
        raw: Whether the output itself follows as a second column.
    """

    kind: str = "auto"
    threshold: float = 0.5
    raw: bool = False

    def __call__(self, outputs: list[Array]) -> list[Array]:
        if self.kind == "auto" and not self.raw:
            return [_plain(output) for output in outputs]
        if self.kind == "array" and not self.raw:
            return outputs
        if len(outputs) != 1:
            raise ConfigError(
                f"the model has {len(outputs)} outputs; predictionType='label' and rawPredictionCol need one."
            )
        (output,) = outputs
        if self.kind == "label":
            first = self._label(output)
        else:
            first = output if self.kind == "array" else _plain(output)
        return [first, _margins(output)] if self.raw else [first]

    def _label(self, output: Array) -> Array:
        wide = _wide(output)
        labels = wide[:, 0] >= self.threshold if wide.shape[1] == 1 else wide.argmax(axis=1)
        return labels.astype(np.float64)


def as_vectors(frame: DataFrame, names: list[str]) -> DataFrame:
    """The frame with its arrays of numbers among these columns as vectors of Spark ML."""
    for field in frame.schema.fields:
        kind = field.dataType
        if field.name in names and isinstance(kind, ArrayType) and isinstance(kind.elementType, NumericType):
            frame = frame.withColumn(field.name, array_to_vector(column(field.name)))
    return frame


def _plain(output: Array) -> Array:
    """One number a row as a double, several as doubles; what is neither stays as it is."""
    if output.dtype.kind not in "biuf" or output.ndim > 2:
        return output
    flat = output[:, 0] if output.ndim == 2 and output.shape[1] == 1 else output
    return flat.astype(np.float64)


def _margins(output: Array) -> Array:
    """Spark's evaluators take a margin for each class: a single output speaks for 1 and against 0."""
    wide = _wide(output)
    return np.concatenate([-wide, wide], axis=1) if wide.shape[1] == 1 else wide


def _wide(output: Array) -> Array:
    if output.dtype.kind not in "biuf":
        raise ConfigError(f"outputs of type {output.dtype} are not numbers; use predictionType='array'.")
    return output.reshape(len(output), int(np.prod(output.shape[1:]))).astype(np.float64)
