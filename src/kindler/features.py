"""Feature transformers: `StringIndexer`, `MinMaxScaler`, `StandardScaler`.

They fit and transform pandas DataFrames, Spark DataFrames (lazily, in the Spark SQL of `spark.features`) and
XShards of pandas DataFrames, with the same results, and keep what they learn as plain JSON.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar, cast, get_args

import numpy as np

from kindler.data.arrays import is_spark_frame
from kindler.data.columns import Array
from kindler.data.shards import frames, pytree
from kindler.errors import ConfigError, DataError, NotFittedError
from kindler.xshards import XShards

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MinMaxScaler", "StandardScaler", "StringIndexer"]

Names: TypeAlias = "str | Sequence[str]"

_FORMAT = 1
# Arguments in what `to_dict` returned before 0.2.
_RENAMED = {
    "inputCol": "input_col",
    "outputCol": "output_col",
    "withMean": "with_mean",
    "withStd": "with_std",
}
_Data = TypeVar("_Data")


class _Transformer(ABC):
    """Learns from data with `fit`, and changes data with `transform`, which returns the same kind of data.

    Subclasses keep the arguments of their constructor as attributes, except for the columns, and what they
    learn as those in `_learned`, with a trailing "_".
    """

    _learned: ClassVar[tuple[str, ...]]

    def __init__(self, input_col: Names | None, output_col: Names | None, *, packs: bool = False) -> None:
        self._inputs = self._names(input_col, "input_col")
        self._packed = packs and isinstance(output_col, str) and len(self._inputs) > 1
        self._outputs = self._inputs if output_col is None else self._names(output_col, "output_col")
        if not self._packed and len(self._outputs) != len(self._inputs):
            raise ConfigError(
                f"{self._name}: {len(self._inputs)} input columns, but output_col={output_col!r} names"
                f" {len(self._outputs)}."
            )

    def fit(self, data: Any) -> Self:
        """Learn from all rows.

        Args:
            data: A pandas DataFrame, a Spark DataFrame (classic or Connect), or an XShards of pandas
                DataFrames.

        Returns:
            This transformer.

        Raises:
            ConfigError: The data is of another kind, or a column is missing.
            DataError: Values cannot be used, or there are none.
        """
        if isinstance(data, XShards):
            seen = data.transform_shard(lambda frame: self._seen(self._checked(frame))).collect()
        elif is_spark_frame(data):
            if data.isStreaming:
                raise ConfigError(f"{self._name}.fit: cannot fit on a streaming DataFrame.")
            seen = [self._seen_by_spark(self._checked(data))]
        else:
            seen = [self._seen(self._checked(data))]
        self._learn(seen)
        return self

    def transform(self, data: _Data) -> _Data:
        """Transform all rows; other columns stay unchanged.

        Args:
            data: As for `fit`. A Spark DataFrame, which may be streaming, is transformed lazily: errors
                about values appear when its rows are computed.

        Raises:
            NotFittedError: `fit` has not been called.
            ConfigError: The data is of another kind, or a column is missing.
            DataError: Values cannot be used.
        """
        self._require_fitted()
        changed: Any
        if isinstance(data, XShards):
            changed = data.transform_shard(lambda frame: self._changed(self._checked(frame)))
        elif is_spark_frame(data):
            changed = self._changed_by_spark(self._checked(data))
        else:
            changed = self._changed(self._checked(data))
        return cast("_Data", changed)

    def fit_transform(self, data: _Data) -> _Data:
        """Fit on the data, then transform it."""
        return self.fit(data).transform(data)

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments and the learned state as JSON-serialisable values."""
        self._require_fitted()
        learned = {name: getattr(self, f"{name}_") for name in self._learned}
        plain = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in learned.items()}
        return {"kind": self._name, "format": _FORMAT, **self._arguments(), "learned": plain}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """Restore a transformer from `to_dict`."""
        rest = dict(state)
        kind, form = rest.pop("kind", None), rest.pop("format", None)
        if kind != cls.__name__ or form != _FORMAT or "learned" not in rest:
            raise ConfigError(
                f"from_dict: received kind {kind!r} and format {form!r}; {cls.__name__} needs"
                f" {cls.__name__!r} and {_FORMAT}."
            )
        learned = rest.pop("learned")
        instance = cls(**{_RENAMED.get(name, name): value for name, value in rest.items()})
        for name in cls._learned:
            value = learned[name]
            setattr(instance, f"{name}_", np.array(value, float) if isinstance(value, list) else value)
        return instance

    def __repr__(self) -> str:
        return f"{self._name}({', '.join(f'{name}={value!r}' for name, value in self._arguments().items())})"

    def _arguments(self) -> dict[str, Any]:
        outputs: Any = self._outputs[0] if self._packed else list(self._outputs)
        columns = {"input_col": list(self._inputs), "output_col": outputs}
        names = inspect.signature(type(self)).parameters
        return {name: columns[name] if name in columns else getattr(self, name) for name in names}

    def _names(self, columns: Names | None, argument: str) -> tuple[str, ...]:
        names = (columns,) if isinstance(columns, str) else tuple(columns or ())
        if not names or not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f"{self._name}({argument}={columns!r}): must be a column name, or a list of them."
            )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"{self._name}({argument}=...): {twice} more than once.")
        return names

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _require_fitted(self) -> None:
        if not hasattr(self, f"{self._learned[0]}_"):
            raise NotFittedError(f"{self._name} is not fitted.\nHint: call fit(data) first.")

    def _checked(self, frame: Any) -> Any:
        if not pytree.is_frame(frame) and not is_spark_frame(frame):
            raise ConfigError(
                f"{self._name}: cannot use a {type(frame).__module__}.{type(frame).__qualname__}.\n"
                "Hint: pass a pandas DataFrame, a Spark DataFrame, or an XShards of pandas DataFrames."
            )
        frames.check_columns(self._inputs, list(frame.columns), self._name)
        return frame

    @abstractmethod
    def _seen(self, frame: Any) -> Any:
        """Statistics of a pandas DataFrame; sent from the workers."""

    @abstractmethod
    def _seen_by_spark(self, frame: Any) -> Any: ...

    @abstractmethod
    def _learn(self, seen: Sequence[Any]) -> None: ...

    @abstractmethod
    def _changed(self, frame: Any) -> Any:
        """A transformed copy of a pandas DataFrame."""

    @abstractmethod
    def _changed_by_spark(self, frame: Any) -> Any: ...


Invalid = Literal["error", "keep", "skip"]


class StringIndexer(_Transformer):
    """Map the values of columns to indices: the most frequent first, ties in sorted order.

    Indices are int64 and start at `first_index`. Missing values have none: `fit` ignores them, and
    `transform` treats them like values that `fit` has not seen.

    Args:
        input_col: The column, or a list of columns, of strings, numbers or booleans.
        output_col: The output column, or a list of them. Default: replace the values.
        handle_invalid: What `transform` does with a value that `fit` has not seen, or that is missing.
            "error" raises DataError, "keep" gives all of them one extra index, "skip" drops the row.
        first_index: The index of the most frequent value. Spark ML has 0; 1 leaves 0 free, as Orca does.

    Attributes:
        labels_: The values of each input column, in the order of their indices.

    Example:
        >>> import pandas as pd
        >>> from kindler.features import StringIndexer
        >>> cities = pd.DataFrame({"city": ["Oslo", "Bergen", "Oslo", "Ålesund"]})
        >>> indexer = StringIndexer("city", "index")
        >>> indexer.fit_transform(cities)["index"].tolist()
        [0, 1, 0, 2]
        >>> indexer.labels_
        {'city': ['Oslo', 'Bergen', 'Ålesund']}
    """

    labels_: dict[str, list[Any]]

    _learned = ("labels",)

    def __init__(
        self,
        input_col: Names,
        output_col: Names | None = None,
        *,
        handle_invalid: Invalid = "error",
        first_index: int = 0,
    ) -> None:
        super().__init__(input_col, output_col)
        if handle_invalid not in get_args(Invalid):
            raise ConfigError(
                f"StringIndexer(handle_invalid={handle_invalid!r}): must be one of {list(get_args(Invalid))}."
            )
        self.handle_invalid = handle_invalid
        self.first_index = int(first_index)

    def _seen(self, frame: Any) -> dict[str, Mapping[Any, int]]:
        return {name: frame[name].dropna().astype(object).value_counts().to_dict() for name in self._inputs}

    def _seen_by_spark(self, frame: Any) -> dict[str, Mapping[Any, int]]:
        from kindler.spark.features import value_counts

        return {name: value_counts(frame, name) for name in self._inputs}

    def _learn(self, seen: Sequence[dict[str, Mapping[Any, int]]]) -> None:
        labels = {}
        for name in self._inputs:
            total: Counter[Any] = Counter()
            for part in seen:
                for value, count in part[name].items():
                    total[_label(value, name)] += int(count)
            if not total:
                raise DataError("there are no values to fit on.", column=name)
            if len({isinstance(value, str) for value in total}) > 1:
                raise DataError(
                    "it mixes strings and numbers.\nHint: convert them all to strings first.", column=name
                )
            labels[name] = sorted(total, key=lambda value: (-total[value], value))
        self.labels_ = labels

    def _changed(self, frame: Any) -> Any:
        columns: dict[str, Array] = {}
        valid = np.ones(len(frame), bool)
        for name, output in zip(self._inputs, self._outputs, strict=True):
            codes = self._codes(frame[name], name)
            if self.handle_invalid == "skip":
                valid &= codes >= 0
            columns[output] = codes + self.first_index
        changed = frame.assign(**columns)
        return changed if valid.all() else changed[valid]

    def _codes(self, column: Any, name: str) -> Array:
        """Codes from 0; -1 for a row to be dropped."""
        import pandas as pd

        labels = self.labels_[name]
        values = column.astype(object).where(column.notna(), None)
        codes: Array = (
            pd.Index(labels, dtype=object).get_indexer(pd.Index(values, dtype=object)).astype(np.int64)
        )
        unknown = codes < 0
        if self.handle_invalid == "error" and unknown.any():
            row = int(np.argmax(unknown))
            raise DataError(_unseen(values.iloc[row]), column=name, row=row)
        if self.handle_invalid == "keep":
            codes[unknown] = len(labels)
        return codes

    def _changed_by_spark(self, frame: Any) -> Any:
        from kindler.spark.features import indexed

        for name, output in zip(self._inputs, self._outputs, strict=True):
            frame = indexed(
                frame,
                name,
                output,
                self.labels_[name],
                first=self.first_index,
                invalid=self.handle_invalid,
                complaint=f"column {name!r}: {_unseen('<value>')}",
            )
        return frame


def _unseen(value: Any) -> str:
    what = "is missing" if value is None else f"{value!r} was not seen by the indexer's fit()"
    return f"{what}.\nHint: handle_invalid='keep' gives such values an index, 'skip' drops their rows."


def _label(value: Any, name: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise DataError(
        f"values of type {type(value).__name__} cannot be indexed.\nHint: convert them to strings first.",
        column=name,
    )


class _Scaler(_Transformer):
    """`(value - center) * factor + offset`, per column or per place of a vector.

    Computed in float64 from count, mean, sum of squared deviations, minimum and maximum of each. Parts are
    merged by Chan's rule, which is as exact as one pass over all rows, whatever the means are.
    """

    vector_: bool

    def __init__(self, input_col: Names | None, output_col: Names | None) -> None:
        super().__init__(input_col, output_col, packs=True)

    @abstractmethod
    def _affine(self) -> tuple[Array, Array, float]:
        """Center and factor of each column, and the common offset."""

    @abstractmethod
    def _take(self, count: Array, mean: Array, squares: Array, low: Array, high: Array) -> None: ...

    def _seen(self, frame: Any) -> tuple[bool, Array]:
        import pandas as pd

        values, vector = self._matrix(frame)
        numbers = pd.DataFrame(values)
        count = numbers.count()
        with np.errstate(invalid="ignore"):  # infinite values are rejected later, as the largest
            mean, squares = numbers.mean().fillna(0), (numbers.var(ddof=0) * count).fillna(0)
        low, high = numbers.min().fillna(np.inf), numbers.max().fillna(-np.inf)
        return vector, np.stack([count, mean, squares, low, high])

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
            column, place = (self._inputs[0], f" at position {i}") if vector else (self._inputs[i], "")
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
        input_col: A column of numbers, a list of them, or a column of vectors (lists or arrays of one length,
            Spark ML vectors), each place of which is scaled separately.
        output_col: The output columns: as many as inputs, or one name for several columns, which then
            become one vector. Default: replace the values.

    Attributes:
        data_min_: The smallest value of each column, or of each place of the vectors.
        data_max_: The largest value.
        scale_: The factor of each.

    Example:
        >>> import pandas as pd
        >>> from kindler.features import MinMaxScaler
        >>> MinMaxScaler(input_col="t").fit_transform(pd.DataFrame({"t": [-5, 0, 15]}))["t"].tolist()
        [0.0, 0.25, 1.0]
    """

    data_min_: Array
    data_max_: Array

    _learned = ("vector", "data_min", "data_max")

    def __init__(
        self,
        min: float = 0.0,  # noqa: A002 - Orca's and Spark's names
        max: float = 1.0,  # noqa: A002
        input_col: Names | None = None,
        output_col: Names | None = None,
    ) -> None:
        super().__init__(input_col, output_col)
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

    Computed in float64. Missing values are ignored by `fit`, and stay missing. With `with_std`, a column that
    is constant in `fit` becomes 0, as in Spark ML.

    Args:
        with_mean: Whether to subtract the mean.
        with_std: Whether to divide by the standard deviation.
        input_col: As for `MinMaxScaler`.
        output_col: As for `MinMaxScaler`.
        ddof: Delta degrees of freedom of the deviation: 1 as in Spark ML, 0 as in scikit-learn.

    Attributes:
        mean_: The mean of each column, or of each place of the vectors.
        scale_: The standard deviation; 0 for a constant.

    Example:
        >>> import pandas as pd
        >>> from kindler.features import StandardScaler
        >>> scaler = StandardScaler(with_mean=True, input_col="t").fit(pd.DataFrame({"t": [1.0, 2.0, 3.0]}))
        >>> scaler.transform(pd.DataFrame({"t": [2.0, 5.0]}))["t"].tolist()
        [0.0, 3.0]
    """

    mean_: Array
    scale_: Array

    _learned = ("vector", "mean", "scale")

    def __init__(
        self,
        with_mean: bool = False,
        with_std: bool = True,
        input_col: Names | None = None,
        output_col: Names | None = None,
        *,
        ddof: int = 1,
    ) -> None:
        super().__init__(input_col, output_col)
        if ddof not in (0, 1):
            raise ConfigError(f"StandardScaler(ddof={ddof!r}): must be 0 or 1.")
        self.with_mean, self.with_std, self.ddof = bool(with_mean), bool(with_std), int(ddof)

    def _affine(self) -> tuple[Array, Array, float]:
        center = self.mean_ if self.with_mean else np.zeros_like(self.mean_)
        if not self.with_std:
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
