"""Which columns of the data a run uses: the user's words checked against what is there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from kindler.data.columns import Column, Columns, complaint
from kindler.errors import ConfigError, DataError

__all__ = ["ColumnOptions", "Names"]

Names: TypeAlias = "str | Sequence[str] | None"

_DEFAULTS = (("features", "label"), ("x", "y"))


@dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """Which columns of the data the model takes, and as what.

    Attributes:
        feature_cols: The inputs, in the model's order; None looks for "features" or "x".
        label_cols: The targets, in the loss's order; None looks for "label" or "y".
        weight_col: A weight per row; it travels as the last of the labels.
        dtypes: numpy dtypes by column.
        shapes: Shapes of one row by column.
        stack_features: Join the features to one matrix.
        allow_nan: For all columns, or the names of those where NaN is a value.
        need_labels: Whether targets must be found when none are named.
    """

    feature_cols: Names = None
    label_cols: Names = None
    weight_col: str | None = None
    dtypes: Mapping[str, Any] | None = None
    shapes: Mapping[str, int | Sequence[int]] | None = None
    stack_features: bool = False
    allow_nan: bool | Sequence[str] = False
    need_labels: bool = True

    @property
    def features(self) -> list[str] | None:
        """The inputs that were named, as a list; None where they were not."""
        return _listed(self.feature_cols)

    @property
    def labels(self) -> list[str] | None:
        """The same for targets."""
        return _listed(self.label_cols)

    def plan(self, available: Mapping[str, Any] | Sequence[str]) -> Columns:
        """The columns of a run.

        Args:
            available: The names that the data has; a mapping to Arrow types lets strings be refused here.

        Raises:
            ConfigError: A name, dtype or shape that does not fit the data.
            DataError: A column whose type cannot feed a model.
        """
        names = list(available)
        features, labels = _chosen(names, self.features, self.labels, self.need_labels)
        if self.weight_col is not None:
            _require(names, [self.weight_col], "sample_weight_col")
            labels = [*labels, self.weight_col]
        if not features:
            raise ConfigError("feature_cols=[]: a model needs at least one input column.")
        for argument, wanted in (("feature_cols", features), ("label_cols", labels)):
            _require(names, wanted, argument)
            _refuse_twice(wanted, argument)
        dtypes, shapes = self.dtypes or {}, self.shapes or {}
        nan = [] if isinstance(self.allow_nan, bool) else _listed(self.allow_nan) or []
        for argument, given in (("dtypes", dtypes), ("shapes", shapes), ("allow_nan", nan)):
            _require(names, given, argument)
        dtype_of = {name: _dtype_name(name, given) for name, given in dtypes.items()}
        shape_of = {name: _shape(name, given) for name, given in shapes.items()}

        def made(name: str, role: Literal["feature", "label"]) -> Column:
            column = Column(
                name=name,
                role=role,
                dtype=dtype_of.get(name),
                shape=shape_of.get(name),
                allow_nan=self.allow_nan if isinstance(self.allow_nan, bool) else name in nan,
            )
            _check_type(available, column)
            return column

        return Columns(
            features=tuple(made(name, "feature") for name in features),
            labels=tuple(made(name, "label") for name in labels),
            stack_features=self.stack_features,
        )


def _listed(names: Names) -> list[str] | None:
    if names is None:
        return None
    return [names] if isinstance(names, str) else list(names)


def _chosen(
    names: Sequence[str], features: list[str] | None, labels: list[str] | None, need_labels: bool
) -> tuple[list[str], list[str]]:
    """Both as the user named them, or by the usual names; a pair of names counts as one."""
    find_labels = labels is None and need_labels
    for feature, label in _DEFAULTS:
        if (features is None and feature not in names) or (find_labels and label not in names):
            continue
        found = [label] if find_labels else labels or []
        return ([feature] if features is None else features), found
    unnamed = {"feature_cols": features is None, "label_cols": find_labels}
    arguments = [f"{argument}=[...]" for argument, missing in unnamed.items() if missing]
    raise ConfigError(
        f"which columns does the model take? The data has {list(names)}; only 'features' and 'label',"
        f" or 'x' and 'y', are found by themselves.\nHint: pass {' and '.join(arguments)}."
    )


def _require(names: Sequence[str], wanted: Iterable[str], argument: str) -> None:
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            guess = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{argument}: there is no column {name!r}.{guess} The data has {list(names)}.")


def _refuse_twice(wanted: Sequence[str], argument: str) -> None:
    twice = sorted({name for name in wanted if wanted.count(name) > 1})
    if twice:
        raise ConfigError(f"{argument}: {twice} more than once.")


def _dtype_name(column: str, given: Any) -> str:
    try:
        dtype = np.dtype(given)
    except TypeError as exc:
        raise ConfigError(f"dtypes={{{column!r}: {given!r}}}: numpy knows no such dtype.") from exc
    if dtype.kind not in "biuf":
        raise ConfigError(
            f"dtypes={{{column!r}: {given!r}}}: a model takes integers, floats or booleans,"
            " for example 'float32', 'int64' or 'uint8'."
        )
    return str(dtype.name)


def _shape(column: str, given: int | Sequence[int]) -> tuple[int, ...]:
    shape = (given,) if isinstance(given, int) else tuple(given)
    if not all(isinstance(size, int | np.integer) and size >= 0 for size in shape):
        raise ConfigError(
            f"shapes={{{column!r}: {given!r}}}: must be the sizes of one row, for example (28, 28)."
        )
    return tuple(int(size) for size in shape)


def _check_type(available: Mapping[str, Any] | Sequence[str], column: Column) -> None:
    found = available[column.name] if isinstance(available, Mapping) else None
    if isinstance(found, pa.DataType):
        problem = complaint(found, dtype=column.dtype)
        if problem:
            raise DataError(problem.replace("<column>", column.name), column=column.name)
