"""`MinMaxScaler` and `StandardScaler`; Spark's side is in `spark.features`. All is computed in float64,
from count, mean, sum of squared deviations, minimum and maximum of each column. Parts are merged by
Chan's rule, which is as exact as one pass over all rows, whatever the means are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from kindler.data.columns import Array
from kindler.errors import ConfigError, DataError
from kindler.features.base import Names, Transformer


class _Scaler(Transformer):
    """`(value - center) * factor + offset`, per column or per place of a vector."""

    vector_: bool

    def __init__(self, inputCol: Names | None, outputCol: Names | None) -> None:
        super().__init__(inputCol, outputCol, packs=True)

    @abstractmethod
    def _affine(self) -> tuple[Array, Array, float]:
        """Center and factor of each column, and the common offset."""

    @abstractmethod
    def _take(self, count: Array, mean: Array, squares: Array, low: Array, high: Array) -> None: ...

    def _seen(self, frame: Any) -> tuple[bool, Array]:
        values, vector = self._matrix(frame)
        present = ~np.isnan(values)
        count = present.sum(axis=0)
        mean = np.where(present, values, 0).sum(axis=0) / np.maximum(count, 1)
        with np.errstate(invalid="ignore"):  # infinite values are rejected later, as the largest
            away = np.where(present, values - mean, 0)
        # The second term is zero but for rounding: it takes the error of the mean out again.
        squares = (away**2).sum(axis=0) - away.sum(axis=0) ** 2 / np.maximum(count, 1)
        low = np.where(present, values, np.inf).min(axis=0, initial=np.inf)
        high = np.where(present, values, -np.inf).max(axis=0, initial=-np.inf)
        return vector, np.stack([count, mean, np.maximum(squares, 0), low, high])

    def _seen_by_spark(self, frame: Any) -> tuple[bool, Array]:
        from kindler.spark.features import number_moments

        vector, moments = number_moments(frame, self._inputs)
        return vector, np.array(moments, np.float64).reshape(-1, 5).T

    def _learn(self, seen: Sequence[tuple[bool, Array]]) -> None:
        counted = [(vector, part) for vector, part in seen if part[0].any()]
        if not counted:
            raise DataError("there are no values to fit on.", column=self._inputs[0])
        vector, first = counted[0]
        for other, part in counted:
            if other != vector or part.shape != first.shape:
                raise DataError(
                    f"it has vectors of {first.shape[1]} and of {part.shape[1]} values; all must have the"
                    " same length.",
                    column=self._inputs[0],
                )
        whole = reduce(_together, [part for _, part in counted])
        for i, (count, _, _, low, high) in enumerate(whole.T):
            column, place = (self._inputs[0], f" at place {i}") if vector else (self._inputs[i], "")
            if not count:
                raise DataError(f"there are no values to fit on{place}.", column=column)
            if not np.isfinite([low, high]).all():
                raise DataError(f"it holds infinite values{place}.", column=column)
        self._take(*whole)
        self.vector_ = vector

    def _changed(self, frame: Any) -> Any:
        values, vector = self._matrix(frame)
        center, factor, offset = self._affine()
        if vector != self.vector_ or values.shape[1] != len(center):
            have = f"vectors of {values.shape[1]} values" if vector else "numbers"
            want = f"vectors of {len(center)}" if self.vector_ else "numbers"
            raise DataError(f"it has {have}, but {self._name} was fitted on {want}.", column=self._inputs[0])
        scaled = (values - center) * factor + offset
        if not self._packed and not vector:
            return frame.assign(**{name: scaled[:, i] for i, name in enumerate(self._outputs)})
        cells = np.empty(len(scaled), object)
        cells[:] = list(scaled)
        if vector:
            cells[frame[self._inputs[0]].isna().to_numpy()] = None
        return frame.assign(**{self._outputs[0]: cells})

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
            vector=self.vector_,
        )

    def _restore(self, learned: Mapping[str, Any]) -> None:
        for name in self._learned:
            value = learned[name]
            setattr(self, f"{name}_", bool(value) if name == "vector" else np.array(value, float))

    def _matrix(self, frame: Any) -> tuple[Array, bool]:
        """The input as float64 with NaN for missing values, and whether it is a column of vectors."""
        columns = [frame[name] for name in self._inputs]
        vectors = [str(column.name) for column in columns if _is_vector(column)]
        if vectors and len(columns) > 1:
            raise DataError(
                f"it holds vectors; {self._name} takes several columns of numbers, or one of vectors.",
                column=vectors[0],
            )
        if vectors:
            return _vectors(columns[0], vectors[0]), True
        if getattr(self, "vector_", False) and columns[0].isna().all():  # and nothing shows it
            return np.full((len(frame), len(self._affine()[0])), np.nan), True
        stacked = [_numbers(column, name) for column, name in zip(columns, self._inputs, strict=True)]
        return np.stack(stacked, axis=1), False


class MinMaxScaler(_Scaler):
    """Scale numbers from the range seen by `fit` to the range from `min` to `max`.

    Computed in float64. Missing values are ignored by `fit`, and stay missing. The range of a constant column
    counts as 1, so that its value becomes `min`. Values that `fit` has not seen may fall outside.

    Args:
        min: The result for the smallest value.
        max: The result for the largest value.
        inputCol: A column of numbers, a list of them, or a column of vectors (lists or arrays of one length,
            Spark ML vectors), each place of which is scaled separately.
        outputCol: The output columns: as many as inputs, or one name for several columns, which then
            become one vector. Default: replace the values.

    Attributes:
        data_min_: The smallest value of each column, or of each place of the vectors.
        data_max_: The largest value.
        scale_: The factor of each.

    Example:
        >>> import pandas as pd
        >>> from kindler import MinMaxScaler
        >>> MinMaxScaler(inputCol="t").fit_transform(pd.DataFrame({"t": [-5, 0, 15]}))["t"].tolist()
        [0.0, 0.25, 1.0]
    """

    data_min_: Array
    data_max_: Array

    _arguments = ("min", "max", "inputCol", "outputCol")
    _learned = ("vector", "data_min", "data_max")

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
        spread = self.data_max_ - self.data_min_
        return (self.max - self.min) / np.where(spread == 0, 1, spread)

    def _affine(self) -> tuple[Array, Array, float]:
        return self.data_min_, self.scale_, self.min

    def _take(self, count: Array, mean: Array, squares: Array, low: Array, high: Array) -> None:
        self.data_min_, self.data_max_ = low, high


class StandardScaler(_Scaler):
    """Divide numbers by their standard deviation, optionally after subtracting their mean.

    Computed in float64. Missing values are ignored by `fit`, and stay missing. With `withStd`, a column that
    is constant in `fit` becomes 0, as in Spark ML.

    Args:
        withMean: Whether to subtract the mean.
        withStd: Whether to divide by the standard deviation.
        inputCol: As for `MinMaxScaler`.
        outputCol: As for `MinMaxScaler`.
        ddof: Delta degrees of freedom of the deviation: 1 as in Spark ML, 0 as in scikit-learn.

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

    _arguments = ("withMean", "withStd", "inputCol", "outputCol", "ddof")
    _learned = ("vector", "mean", "scale")

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

    def _take(self, count: Array, mean: Array, squares: Array, low: Array, high: Array) -> None:
        self.mean_ = mean
        deviation = np.sqrt(squares / np.maximum(count - self.ddof, 1))
        # What rounding leaves of the deviation of a constant is not a deviation.
        self.scale_ = np.where(low == high, 0.0, deviation)


def _together(a: Array, b: Array) -> Array:
    """Chan's rule for two parts."""
    count, apart = a[0] + b[0], b[1] - a[1]
    share = b[0] / np.maximum(count, 1)
    squares = a[2] + b[2] + apart**2 * a[0] * share
    return np.stack([count, a[1] + apart * share, squares, np.minimum(a[3], b[3]), np.maximum(a[4], b[4])])


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
