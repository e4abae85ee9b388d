"""`MinMaxScaler` and `StandardScaler`: numbers moved and stretched; Spark's side is in `spark.features`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kindler.data.columns import Array
from kindler.errors import ConfigError, DataError
from kindler.features import moments
from kindler.features.base import Transformer
from kindler.features.moments import Moments
from kindler.features.names import Names, input_names, output_names


class _Scaler(Transformer):
    """`(value - center) * factor + offset`, for each column or for each place of a vector.

    What goes in is a column of numbers, several of them, or a column of vectors; what comes out is as many
    columns, or vectors if there is one name for several columns.
    """

    _vector: bool

    def __init__(self, inputCol: Names | None, outputCol: Names | None) -> None:
        self._inputs = input_names(inputCol, self._name)
        self._packed = isinstance(outputCol, str) and len(self._inputs) > 1
        wanted = self._inputs[:1] if self._packed else self._inputs
        self._outputs = output_names(outputCol, wanted, self._name)

    @property
    def _fitted(self) -> bool:
        return hasattr(self, "_vector")

    @abstractmethod
    def _affine(self) -> tuple[Array, Array, float]:
        """Center and factor of each column, and what is added to all."""

    @abstractmethod
    def _take(self, whole: Moments) -> None:
        """Take in what all rows say."""

    def _seen(self, frame: Any) -> Moments:
        values, vector = self._matrix(frame)
        return moments.of(values, vector=vector)

    def _seen_by_spark(self, frame: Any) -> Moments:
        from kindler.spark.features import number_moments

        seen = number_moments(frame, self._inputs)
        count, mean, squares, low, high = (np.array(part, np.float64) for part in seen.columns)
        return Moments(count, mean, squares, low, high, seen.vector)

    def _learn(self, seen: Sequence[Moments]) -> None:
        whole = moments.merged(seen, self._inputs)
        self._take(whole)
        self._vector = whole.vector

    def _changed(self, frame: Any) -> Any:
        values, vector = self._matrix(frame)
        center, factor, offset = self._affine()
        if vector != self._vector or values.shape[1] != len(center):
            have = f"vectors of {values.shape[1]} values" if vector else "numbers"
            want = f"vectors of {len(center)}" if self._vector else "numbers"
            raise DataError(f"it has {have}, but {self._name} was fitted on {want}.", column=self._inputs[0])
        scaled = (values - center) * factor + offset
        if self._packed:
            return frame.assign(**{self._outputs[0]: _cells(scaled, np.zeros(len(scaled), bool))})
        if self._vector:
            missing = frame[self._inputs[0]].isna().to_numpy()
            return frame.assign(**{self._outputs[0]: _cells(scaled, missing)})
        return frame.assign(**{name: scaled[:, i] for i, name in enumerate(self._outputs)})

    def _changed_by_spark(self, frame: Any) -> Any:
        from kindler.spark.features import scaled

        center, factor, offset = self._affine()
        return scaled(
            frame,
            self._inputs,
            self._outputs,
            center=center.tolist(),
            factor=factor.tolist(),
            offset=offset,
            vector=self._vector,
        )

    def _arguments(self) -> dict[str, Any]:
        outputs: Any = self._outputs[0] if self._packed else list(self._outputs)
        return {"inputCol": list(self._inputs), "outputCol": outputs}

    def _matrix(self, frame: Any) -> tuple[Array, bool]:
        """The input as float64, NaN where a value is missing, and whether it is a column of vectors."""
        columns = [frame[name] for name in self._inputs]
        if any(_is_vector(column) for column in columns):
            if len(columns) > 1:
                raise DataError(
                    f"it holds vectors; {self._name} takes several columns of numbers, or one of vectors.",
                    column=next(str(column.name) for column in columns if _is_vector(column)),
                )
            return _vectors(columns[0], self._inputs[0]), True
        if (
            self._fitted and self._vector and columns[0].isna().all()
        ):  # nothing there tells that it is vectors
            return np.full((len(frame), len(self._affine()[0])), np.nan), True
        stacked = [_numbers(column, name) for column, name in zip(columns, self._inputs, strict=True)]
        return np.stack(stacked, axis=1), False


class MinMaxScaler(_Scaler):
    """Brings numbers from the range that `fit` has seen to the range from `min` to `max`.

    Computed in float64. Missing values do not count in `fit`, and stay missing. A column that is constant in
    `fit` has no range: it counts as 1, so that this value becomes `min`. What `fit` has not seen may lie
    outside.

    Args:
        min: What the smallest value becomes.
        max: What the largest becomes.
        inputCol: A column of numbers, a list of them, or a column of vectors (lists or arrays of one length,
            Spark ML vectors), each place of which is scaled by itself.
        outputCol: Where the results go: as many names, or one name for several columns, which then come out
            as one vector. Default: in place of the values.

    Attributes:
        data_min_: The smallest value of each column, or of each place of the vectors.
        data_max_: The largest.
        scale_: What values are multiplied by.

    Example:
        >>> import pandas as pd
        >>> from kindler import MinMaxScaler
        >>> MinMaxScaler(inputCol="t").fit_transform(pd.DataFrame({"t": [-5, 0, 15]}))["t"].tolist()
        [0.0, 0.25, 1.0]
    """

    data_min_: Array
    data_max_: Array

    def __init__(
        self,
        min: float = 0.0,  # noqa: A002 - Orca's and Spark's names
        max: float = 1.0,  # noqa: A002
        inputCol: Names | None = None,
        outputCol: Names | None = None,
    ) -> None:
        super().__init__(inputCol, outputCol)
        if not min < max:
            raise ConfigError(f"MinMaxScaler(min={min}, max={max}): min must be less than max.")
        self.min, self.max = float(min), float(max)

    @property
    def scale_(self) -> Array:
        """What values are multiplied by."""
        spread = self.data_max_ - self.data_min_
        return (self.max - self.min) / np.where(spread == 0, 1, spread)

    def _affine(self) -> tuple[Array, Array, float]:
        return self.data_min_, self.scale_, self.min

    def _take(self, whole: Moments) -> None:
        self.data_min_, self.data_max_ = whole.low, whole.high

    def _arguments(self) -> dict[str, Any]:
        return {"min": self.min, "max": self.max, **super()._arguments()}

    def _learned(self) -> dict[str, Any]:
        return {
            "vector": self._vector,
            "data_min": self.data_min_.tolist(),
            "data_max": self.data_max_.tolist(),
        }

    def _restore(self, learned: Mapping[str, Any]) -> None:
        self.data_min_, self.data_max_ = (np.array(learned[key], float) for key in ("data_min", "data_max"))
        self._vector = bool(learned["vector"])


class StandardScaler(_Scaler):
    """Divides numbers by their standard deviation, and takes their mean away if that is asked for.

    Computed in float64. Missing values do not count in `fit`, and stay missing. With `withStd`, a column that
    is constant in `fit` becomes 0, as in Spark ML.

    Args:
        withMean: Whether to take the mean away.
        withStd: Whether to divide by the deviation.
        inputCol: As for `MinMaxScaler`.
        outputCol: As for `MinMaxScaler`.
        ddof: The deviation divides by the number of values less this: 1 as Spark ML, 0 as scikit-learn.

    Attributes:
        mean_: The mean of each column, or of each place of the vectors.
        scale_: The standard deviation; 0 for a constant.

    Example:
        >>> import pandas as pd
        >>> from kindler import StandardScaler
        >>> scaler = StandardScaler(withMean=True, inputCol="t").fit(pd.DataFrame({"t": [1.0, 2.0, 3.0]}))
        >>> scaler.transform(pd.DataFrame({"t": [2.0, 5.0]}))["t"].tolist()
        [0.0, 3.0]
    """

    mean_: Array
    scale_: Array

    def __init__(
        self,
        withMean: bool = False,
        withStd: bool = True,
        inputCol: Names | None = None,
        outputCol: Names | None = None,
        *,
        ddof: int = 1,
    ) -> None:
        super().__init__(inputCol, outputCol)
        if ddof not in (0, 1):
            raise ConfigError(f"StandardScaler(ddof={ddof!r}): must be 0 or 1.")
        self.withMean, self.withStd, self.ddof = bool(withMean), bool(withStd), int(ddof)

    def _affine(self) -> tuple[Array, Array, float]:
        center = self.mean_ if self.withMean else np.zeros_like(self.mean_)
        if not self.withStd:
            return center, np.ones_like(self.mean_), 0.0
        return center, np.where(self.scale_ == 0, 0, 1 / np.where(self.scale_ == 0, 1, self.scale_)), 0.0

    def _take(self, whole: Moments) -> None:
        self.mean_ = whole.mean
        deviation = np.sqrt(whole.squares / np.maximum(whole.count - self.ddof, 1))
        # What rounding leaves of the deviation of a constant is no deviation.
        self.scale_ = np.where(whole.low == whole.high, 0.0, deviation)

    def _arguments(self) -> dict[str, Any]:
        given = {"withMean": self.withMean, "withStd": self.withStd, **super()._arguments()}
        return {**given, "ddof": self.ddof}

    def _learned(self) -> dict[str, Any]:
        return {"vector": self._vector, "mean": self.mean_.tolist(), "scale": self.scale_.tolist()}

    def _restore(self, learned: Mapping[str, Any]) -> None:
        self.mean_, self.scale_ = (np.array(learned[key], float) for key in ("mean", "scale"))
        self._vector = bool(learned["vector"])


def _is_vector(column: Any) -> bool:
    if column.dtype != object:
        return False
    present = column[column.notna()]
    return len(present) > 0 and isinstance(present.iloc[0], list | tuple | np.ndarray)


def _numbers(column: Any, name: str) -> Array:
    if column.dtype.kind in "mM":
        raise DataError(f"values of type {column.dtype} are not numbers.", column=name)
    try:
        numbers: Array = column.to_numpy(dtype=np.float64, na_value=np.nan)
    except (ValueError, TypeError) as exc:
        raise DataError(f"its values are not numbers: {exc}", column=name) from exc
    return numbers


def _vectors(column: Any, name: str) -> Array:
    missing = column.isna().to_numpy()
    width = len(column.to_numpy()[int(np.argmin(missing))])
    values = np.full((len(column), width), np.nan)
    for row, cell in enumerate(column):
        if missing[row]:
            continue
        if len(cell) != width:
            raise DataError(f"has {len(cell)} values where others have {width}.", column=name, row=row)
        try:
            values[row] = np.asarray(cell, np.float64)
        except (ValueError, TypeError) as exc:
            raise DataError(f"its values are not numbers: {exc}", column=name, row=row) from exc
    return values


def _cells(values: Array, missing: Array) -> Any:
    """Rows of a matrix as cells of a column."""
    cells = np.empty(len(values), object)
    for row in range(len(values)):
        cells[row] = None if missing[row] else values[row]
    return cells
