"""Counts, means, sums of squares and extremes of columns of numbers, and those of parts put together. Pure.

All is computed in float64; NaN stands for a missing value and does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from kindler.data.columns import Array
from kindler.errors import DataError


@dataclass(frozen=True)
class Moments:
    """What is known of some columns; every array has an entry for each.

    Attributes:
        count: How many values there are.
        mean: Their mean; 0 where there are none.
        squares: The sum of their squared distances from the mean.
        low: The smallest; infinite where there are none.
        high: The largest.
        vector: Whether the columns are the places of one column of vectors.
    """

    count: Array
    mean: Array
    squares: Array
    low: Array
    high: Array
    vector: bool = False


def of(values: Array, *, vector: bool) -> Moments:
    """Of a matrix of rows."""
    present = ~np.isnan(values)
    count = present.sum(axis=0)
    mean = np.where(present, values, 0).sum(axis=0) / np.maximum(count, 1)
    with np.errstate(invalid="ignore"):  # infinity is refused later, by what is the largest
        away = np.where(present, values - mean, 0)
    # The second term is zero but for rounding: it takes the error of the mean out again.
    squares = (away**2).sum(axis=0) - away.sum(axis=0) ** 2 / np.maximum(count, 1)
    low = np.where(present, values, np.inf).min(axis=0, initial=np.inf)
    high = np.where(present, values, -np.inf).max(axis=0, initial=-np.inf)
    return Moments(count, mean, np.maximum(squares, 0), low, high, vector)


def merged(parts: Sequence[Moments], names: Sequence[str]) -> Moments:
    """Of all rows; `names` are the columns'.

    Raises:
        DataError: A column without values or with infinite ones, or vectors of different lengths.
    """
    counted = [part for part in parts if part.count.size and part.count.any()]
    if not counted:
        raise DataError("there are no values to fit on.", column=names[0])
    for part in counted:
        if part.vector != counted[0].vector or part.count.size != counted[0].count.size:
            raise DataError(
                f"it has vectors of {counted[0].count.size} and of {part.count.size} values;"
                " all must have the same length.",
                column=names[0],
            )
    whole = reduce(_together, counted)
    for i, count in enumerate(whole.count):
        column = names[0] if whole.vector else names[i]
        place = f" at place {i}" if whole.vector else ""
        if not count:
            raise DataError(f"there are no values to fit on{place}.", column=column)
        if not np.isfinite([whole.low[i], whole.high[i]]).all():
            raise DataError(f"it holds infinite values{place}.", column=column)
    return whole


def _together(a: Moments, b: Moments) -> Moments:
    """Chan's rule: as exact as one pass over all rows, whatever the means are."""
    count = a.count + b.count
    apart = b.mean - a.mean
    share = b.count / np.maximum(count, 1)
    return Moments(
        count,
        a.mean + apart * share,
        a.squares + b.squares + apart**2 * a.count * share,
        np.minimum(a.low, b.low),
        np.maximum(a.high, b.high),
        a.vector,
    )
