"""`StringIndexer`: values as indices, the most frequent first; Spark's side is in `spark.features`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from kindler.data.columns import Array
from kindler.errors import ConfigError, DataError
from kindler.features.base import Names, Transformer

Invalid = Literal["error", "keep", "skip"]


class StringIndexer(Transformer):
    """Map the values of columns to indices: the most frequent first, ties in sorted order.

    Indices are int64 and start at `first_index`. Missing values have none: `fit` ignores them, and
    `transform` treats them like values that `fit` has not seen.

    Args:
        inputCol: The column, or a list of columns, of strings, numbers or booleans.
        outputCol: The output column, or a list of them. Default: replace the values.
        handle_invalid: What `transform` does with a value that `fit` has not seen, or that is missing.
            "error" raises DataError, "keep" gives all of them one extra index, "skip" drops the row.
        first_index: The index of the most frequent value. Spark ML has 0; 1 leaves 0 free, as Orca does.

    Attributes:
        labels_: The values of each input column, in the order of their indices.

    Example:
        >>> import pandas as pd
        >>> from kindler import StringIndexer
        >>> cities = pd.DataFrame({"city": ["Oslo", "Bergen", "Oslo", "Ålesund"]})
        >>> indexer = StringIndexer("city", "index")
        >>> indexer.fit_transform(cities)["index"].tolist()
        [0, 1, 0, 2]
        >>> indexer.labels_
        {'city': ['Oslo', 'Bergen', 'Ålesund']}
    """

    labels_: dict[str, list[Any]]

    _arguments = ("inputCol", "outputCol", "handle_invalid", "first_index")
    _learned = ("labels",)

    def __init__(
        self,
        inputCol: Names,
        outputCol: Names | None = None,
        *,
        handle_invalid: Invalid = "error",
        first_index: int = 0,
    ) -> None:
        super().__init__(inputCol, outputCol)
        if handle_invalid not in get_args(Invalid):
            raise ConfigError(
                f"StringIndexer(handle_invalid={handle_invalid!r}): must be one of {list(get_args(Invalid))}."
            )
        self.handle_invalid = handle_invalid
        self.first_index = int(first_index)

    def _seen(self, frame: Any) -> dict[str, Mapping[Any, int]]:
        columns = {name: frame[name] for name in self._inputs}
        return {
            name: column[column.notna()].astype(object).value_counts().to_dict()
            for name, column in columns.items()
        }

    def _seen_by_spark(self, frame: Any) -> dict[str, Mapping[Any, int]]:
        from kindler.spark.features import value_counts

        return {name: value_counts(frame, name) for name in self._inputs}

    def _learn(self, seen: Sequence[dict[str, Mapping[Any, int]]]) -> None:
        labels = {}
        for name in self._inputs:
            total: Counter[Any] = Counter()
            for part in seen:
                for value, count in part[name].items():
                    total[_plain(value, name)] += int(count)
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

    def _restore(self, learned: Mapping[str, Any]) -> None:
        self.labels_ = {name: list(learned["labels"][name]) for name in self._inputs}


def _unseen(value: Any) -> str:
    what = "is missing" if value is None else f"{value!r} was not there when the indexer learned"
    return f"{what}.\nHint: handle_invalid='keep' gives such values an index, 'skip' leaves their rows out."


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise DataError(
        f"values of type {type(value).__name__} cannot be indexed.\nHint: convert them to strings first.",
        column=name,
    )
