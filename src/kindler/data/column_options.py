"""Selects the columns of a run: the user's options, checked against the data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from kindler.data.columns import Column, ColumnPlan, complaint, ragged_type
from kindler.errors import ConfigError, DataError, did_you_mean

Names: TypeAlias = "str | Sequence[str] | None"

_DEFAULTS = (("features", "label"), ("x", "y"))


@dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """Which columns of the data the model takes, and as what.

    Attributes:
        feature_cols: The model's input columns, in its order. None looks for "features" or "x".
        label_cols: The target columns. None looks for "label" or "y".
        weight_col: A column with the weight of each row, in training and validation.
        dtypes: numpy dtypes, by column. Binary columns need one.
        shapes: The shape of one row, by column: `{"image": (28, 28, 1)}`.
        stack_features: Whether to join all feature columns into one float32 matrix.
        allow_nan: Whether NaN is an allowed value, for all columns or for the ones named.
        need_labels: Whether to look for label columns if none are named; "optional": there may be none.
        ragged: Which columns may have rows of different lengths: none, those of "text", or "all" that are
            text, bytes without a dtype, or lists without a shape.
        length_col: The column that gives a row's length; read even if the model does not take it.
        remembered: Options that the user left out, taken from the last `fit`.
    """

    feature_cols: Names = None
    label_cols: Names = None
    weight_col: str | None = None
    dtypes: Mapping[str, Any] | None = None
    shapes: Mapping[str, int | Sequence[int]] | None = None
    stack_features: bool | None = None
    allow_nan: bool | Sequence[str] | None = None
    need_labels: bool | Literal["optional"] = True
    ragged: Literal["text", "all"] | None = None
    length_col: str | None = None
    remembered: frozenset[str] = field(default=frozenset(), compare=False)

    def or_else(self, known: ColumnOptions) -> ColumnOptions:
        missing = {f.name: getattr(known, f.name) for f in fields(self) if getattr(self, f.name) is None}
        return replace(self, **missing, remembered=frozenset(missing))

    def within(self, available: Collection[str]) -> ColumnOptions:
        return replace(
            self._by_column(lambda name: name if name in available else None),
            feature_cols=self.feature_cols if set(self.features or ()) <= set(available) else None,
            label_cols=self.label_cols if set(self.labels or ()) <= set(available) else None,
        )

    def renamed(self, features: Sequence[str], labels: Sequence[str]) -> ColumnOptions:
        """Rename the columns, in order; raises ConfigError if the counts differ."""
        asked = {"feature_cols": (self.features, features), "label_cols": (self.labels, labels)}
        names: dict[str, str] = {}
        for option, (own, others) in asked.items():
            stacks = option == "feature_cols" and bool(self.stack_features) and len(others) == 1
            if own is not None and len(own) != len(others) and not stacks:
                raise ConfigError(f"{option}={own} names {len(own)} columns; the data has {list(others)}.")
            names |= dict(zip(own or (), others, strict=False))

        named = self._by_column(lambda name: names.get(name, name))
        return replace(named, feature_cols=tuple(features), label_cols=tuple(labels) or None)

    def without_labels(self) -> ColumnOptions:
        apart = {*(self.labels or ()), self.weight_col}
        kept = self._by_column(lambda name: None if name in apart else name)
        return replace(kept, label_cols=None, need_labels=False)

    def _by_column(self, change: Callable[[str], str | None]) -> ColumnOptions:
        """With other names in the options by column; None leaves a column out."""

        def changed(by_name: Mapping[str, Any] | None) -> dict[str, Any] | None:
            if by_name is None:
                return None
            return {new: value for name, value in by_name.items() if (new := change(name)) is not None}

        nan = self.allow_nan
        if nan is not None and not isinstance(nan, bool):
            nan = list(changed(dict.fromkeys(_listed(nan) or ())) or ())
        return replace(self, shapes=changed(self.shapes), dtypes=changed(self.dtypes), allow_nan=nan)

    def or_implied(self, features: Names, labels: Names) -> ColumnOptions:
        """With the columns that the form of the data implies, where the options leave it open."""
        implied = self if self.feature_cols is not None else replace(self, feature_cols=features)
        if self.label_cols is None and self.need_labels:
            implied = replace(implied, label_cols=labels)
        return implied

    @property
    def features(self) -> list[str] | None:
        return _listed(self.feature_cols)

    @property
    def labels(self) -> list[str] | None:
        return _listed(self.label_cols)

    def plan(self, available: Mapping[str, Any] | Sequence[str]) -> ColumnPlan:
        """Resolve the columns of a run.

        Args:
            available: The columns of the data. If given with Arrow types, columns that no model takes
                are refused here.

        Raises:
            ConfigError: A name, dtype or shape does not fit the data.
            DataError: A column has a type that cannot feed a model.
        """
        names = list(available)
        features, labels = _chosen(names, self.features, self.labels, self.need_labels)
        if self.weight_col is not None:
            _require(names, [self.weight_col], "weight_col")
            labels = [*labels, self.weight_col]
        if not features:
            raise ConfigError("feature_cols=[]: a model needs at least one input column.")
        for argument, wanted in (("feature_cols", features), ("label_cols", labels)):
            _require(names, wanted, argument, trained=argument in self.remembered)
            _refuse_twice(wanted, argument)
        dtypes, shapes = self.dtypes or {}, self.shapes or {}
        allow_nan = self.allow_nan or False
        nan = [] if isinstance(allow_nan, bool) else _listed(allow_nan) or []
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
                allow_nan=allow_nan if isinstance(allow_nan, bool) else name in nan,
            )
            kind = available[name] if isinstance(available, Mapping) else None
            if not isinstance(kind, pa.DataType):
                return column
            if self.ragged is not None and ragged_type(kind, column, text_only=self.ragged == "text"):
                return replace(column, ragged=True)
            if problem := complaint(kind, dtype=column.dtype):
                raise DataError(problem.replace("<column>", name), column=name)
            return column

        extra = [] if self.length_col in (None, *features, *labels) else [str(self.length_col)]
        _require(names, extra, "length_col")
        inputs = tuple(made(name, "feature") for name in features)
        texts = [column.name for column in inputs if column.ragged]
        if self.stack_features and self.ragged == "text" and texts:
            raise ConfigError(f"stack_features=True joins numbers, but {texts[0]!r} is text.")
        return ColumnPlan(
            features=inputs,
            labels=tuple(made(name, "label") for name in labels),
            # What is made of the columns first is joined afterwards.
            stack_features=bool(self.stack_features) and self.ragged != "all",
            others=tuple(made(name, "feature") for name in extra),
        )


def _listed(names: Names) -> list[str] | None:
    if names is None:
        return None
    return [names] if isinstance(names, str) else list(names)


def _chosen(
    names: Sequence[str],
    features: list[str] | None,
    labels: list[str] | None,
    need_labels: bool | Literal["optional"],
) -> tuple[list[str], list[str]]:
    find_labels = labels is None and bool(need_labels)
    for feature, label in _DEFAULTS:
        if (features is None and feature not in names) or (find_labels and label not in names):
            continue
        found = [label] if find_labels else labels or []
        return ([feature] if features is None else features), found
    if find_labels and need_labels is not True:
        return _chosen(names, features, labels, False)
    unnamed = {"feature_cols": features is None, "label_cols": find_labels}
    arguments = [f"{argument}=[...]" for argument, missing in unnamed.items() if missing]
    raise ConfigError(
        f"which columns does the model take? The data has {list(names)}; only 'features' and 'label', or 'x'"
        f" and 'y', are recognized without being named.\nHint: pass {' and '.join(arguments)}."
    )


def _require(names: Sequence[str], wanted: Iterable[str], argument: str, *, trained: bool = False) -> None:
    for name in wanted:
        if name not in names:
            has = f"{did_you_mean(name, names)} The data has {list(names)}."
            if trained:
                raise ConfigError(
                    f"the model was trained on a column {name!r}, which is missing.{has}\n"
                    f"Hint: if it has another name here, pass {argument}=[...]."
                )
            raise ConfigError(f"{argument}: there is no column {name!r}.{has}")


def _refuse_twice(wanted: Sequence[str], argument: str) -> None:
    twice = sorted({name for name in wanted if wanted.count(name) > 1})
    if twice:
        raise ConfigError(f"{argument}: {twice} appear more than once.")


def _dtype_name(column: str, given: Any) -> str:
    try:
        dtype = np.dtype(given)
    except TypeError as exc:
        raise ConfigError(f"dtypes={{{column!r}: {given!r}}}: not a numpy dtype.") from exc
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
