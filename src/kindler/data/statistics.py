"""What is known of the values of each column: counts, moments, quantiles and categories, of a sample of rows.

A column is summarised by one or more measures, each a number or a text per row: its values; those of each
place, if a row has a few; the mean of some, if it has many; the length, if rows differ in it. Summaries of
parts (workers, partitions, batches) are merged by the rows that they stand for. The rank of a quantile is
wrong by at most one part in `POINTS` for the rows that were looked at, and by two of them after a merge.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from kindler.data.columns import Array, Column
from kindler.data.ragged import Ragged, read_column
from kindler.errors import DataError

STATISTICS = "statistics.json"  # in the folder of a stored model
POINTS = 128
MOST_MEASURES = 256
_FORMAT = 1
FEW, _SOME = 32, 64  # values of a row that are measured one by one, or of which the mean is taken
_MOST_BYTES = 4 << 20
_MOST_CATEGORIES, _MOST_TEXT_BYTES, _MOST_NAME = 64, 64, 500
_LEAST_ROWS, _MOST_ROWS, _ONE_OF = 1024, 4096, 32

_MEASURE = re.compile(r"(?:mean|length)\((?P<of>.*)\)|(?P<at>.*)\[\d+\]", re.DOTALL)

Category: TypeAlias = "str | float"


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One measure.

    Attributes:
        rows: The rows that it stands for; `sampled` of them were looked at.
        missing: The share that is null, NaN or infinite; the other fields are of the rest.
        quantiles: Values at evenly spaced ranks, from the least to the greatest; empty for texts.
        categories: The share of each value, if there are few of them.
    """

    rows: int
    sampled: int
    missing: float = 0.0
    mean: float | None = None
    std: float | None = None
    quantiles: tuple[float, ...] = ()
    categories: Mapping[Category, float] | None = None

    def rank(self, values: Array) -> Array:
        """The share of values that are at most each of these."""
        if not self.quantiles:
            return np.zeros(len(values))
        points, steps = np.asarray(self.quantiles), len(self.quantiles) - 1
        after = np.searchsorted(points, values, side="right")
        low, high = points[np.maximum(after - 1, 0)], points[np.minimum(after, steps)]
        width = np.where(high > low, high - low, 1.0)
        inside = np.clip((values - low) / width, 0.0, 1.0)
        ranks: Array = np.where(after == 0, 0.0, np.where(after > steps, 1.0, (after - 1 + inside) / steps))
        return ranks

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "sampled": self.sampled,
            "missing": _short(self.missing),
            "mean": None if self.mean is None else _short(self.mean),
            "std": None if self.std is None else _short(self.std),
            "quantiles": [_short(value) for value in self.quantiles],
            "categories": self.categories
            and [[value, _short(share)] for value, share in self.categories.items()],
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Summary:
        """Raises ValueError, TypeError, KeyError or OverflowError if this is not what `to_json` returned."""
        quantiles = tuple(_number(value) for value in content["quantiles"])
        if len(quantiles) == 1 or len(quantiles) > POINTS + 1 or any(np.diff(quantiles) < 0):
            raise ValueError("quantiles that are too many, or not in order")
        categories = content["categories"]
        if categories is not None:
            categories = {_category(value): _share(share) for value, share in categories}
            if len(categories) > _MOST_CATEGORIES:
                raise ValueError(f"{len(categories)} categories; at most {_MOST_CATEGORIES} are kept")
        return Summary(
            rows=_count(content["rows"]),
            sampled=_count(content["sampled"]),
            missing=_share(content["missing"]),
            mean=None if content["mean"] is None else _number(content["mean"]),
            std=None if content["std"] is None else _number(content["std"]),
            quantiles=quantiles,
            categories=categories,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """The measures of training data by name, and those of what the model predicts for validation data."""

    columns: Mapping[str, Summary]
    predictions: Mapping[str, Summary] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        parts = {"columns": self.columns, "predictions": self.predictions}
        return {
            "format": _FORMAT,
            **{part: {name: one.to_json() for name, one in named.items()} for part, named in parts.items()},
        }

    @staticmethod
    def from_json(content: Any) -> Statistics:
        """Whoever wrote a model may have written anything as its statistics: all of it is checked."""
        try:
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']!r}; this version reads {_FORMAT}")
            return Statistics(
                columns=_summaries(content["columns"]), predictions=_summaries(content["predictions"])
            )
        except (ValueError, TypeError, KeyError, OverflowError, AttributeError) as exc:
            raise DataError(f"these are not statistics of a model: {str(exc)[:200]}.") from exc

    @staticmethod
    def read(path: Path) -> Statistics:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise DataError(f"the statistics of a model have more than {_MOST_BYTES:,} bytes.")
        try:
            return Statistics.from_json(json.loads(content))
        except (ValueError, RecursionError) as exc:
            raise DataError(f"these are not statistics of a model: {str(exc)[:200]}.") from exc


def sample_size(rows: int) -> int:
    """Of how many rows a worker makes its statistics: few enough to cost little of the time of reading them.

    >>> [sample_size(rows) for rows in (100, 10_000, 100_000, 10_000_000)]
    [100, 1024, 3125, 4096]
    """
    return min(rows, _MOST_ROWS, max(_LEAST_ROWS, rows // _ONE_OF))


def some_rows(rows: int, count: int, *, seed: int = 0) -> Array:
    """One place at random in each of `count` even stretches."""
    turns = np.arange(count) + np.random.default_rng(seed).random(count)
    return np.minimum((turns * (rows / max(1, count))).astype(np.int64), rows - 1)


def measured(columns: Mapping[str, Any], rows: Array | None = None) -> dict[str, Array]:
    """The measures of columns, each one value per row; of some of their rows only, if `rows` are given."""
    every = (
        (name, one) for column, values in columns.items() for name, one in _measures(column, values, rows)
    )
    return dict(islice(every, MOST_MEASURES))


def summarised(measures: Mapping[str, Array], rows: int, *, cut: bool = False) -> dict[str, Summary]:
    """Summaries of measures that were taken of a sample of so many rows.

    Texts that are too many for categories are left out; with `cut`, which is for comparisons alone, the most
    frequent ones stay.
    """
    numbers: dict[int, dict[str, Array]] = defaultdict(dict)
    made: dict[str, Summary | None] = {}
    for name, values in measures.items():
        if values.dtype == object:
            made[name] = _of_texts(values, rows, cut=cut)
        else:
            numbers[len(values)][name] = values
    for alike in numbers.values():
        made |= zip(alike, _of_numbers(list(alike.values()), rows), strict=True)
    return {name: one for name in measures if (one := made[name]) is not None}


def as_predictions(outputs: Sequence[Any]) -> dict[str, Any]:
    """The outputs of a model by the names that their columns have by default."""
    return {f"prediction_{i}" if len(outputs) > 1 else "prediction": one for i, one in enumerate(outputs)}


def described(columns: Mapping[str, Any], known: Collection[str]) -> dict[str, Summary]:
    """Summaries of a sample of rows, in numpy or Arrow, to be compared with measures of these names."""
    rows = len(next(iter(columns.values()), ()))
    some = some_rows(rows, sample_size(rows))
    measures: dict[str, Array] = {}
    for name, column in columns.items():
        if isinstance(column, np.ndarray):
            measures |= measured({name: column}, some)
        else:
            measures |= _of_arrow(name, column.take(pa.array(some)), known)
    return summarised({name: one for name, one in measures.items() if name in known}, rows, cut=True)


def columns_of(measures: Iterable[str]) -> set[str]:
    """What the columns of these measures may be called.

    >>> sorted(columns_of(["age", "x[0]", "x[1]", "mean(image)"]))
    ['age', 'image', 'mean(image)', 'x', 'x[0]', 'x[1]']
    """
    inside = (_MEASURE.fullmatch(name) for name in measures)
    return {*measures, *(match["of"] or match["at"] for match in inside if match is not None)}


def merged(parts: Sequence[Mapping[str, Summary]]) -> dict[str, Summary]:
    """Summaries of all rows, from those of parts that have no row in common."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _merged([part[name] for part in parts if name in part]) for name in names}


def _measures(name: str, values: Any, rows: Array | None) -> list[tuple[str, Array]]:
    if isinstance(values, Ragged):
        return _of_ragged(name, values, np.arange(len(values)) if rows is None else rows)
    array = np.asarray(values)
    if array.dtype.kind in "OUS":
        return _of_objects(name, array if rows is None else array[rows])
    if array.dtype.kind not in "biuf":
        return []
    flat = array.reshape(len(array), math.prod(array.shape[1:]))
    width = flat.shape[1]
    if width > FEW:
        places = np.linspace(0, width - 1, min(width, _SOME)).astype(np.int64)
        some = flat[:, places] if rows is None else flat[rows[:, None], places]
        return [(f"mean({name})", some.mean(axis=1, dtype=np.float64))]
    flat = flat if rows is None else flat[rows]
    return [(name if width == 1 else f"{name}[{i}]", flat[:, i]) for i in range(width)]


def _of_ragged(name: str, values: Ragged, rows: Array) -> list[tuple[str, Array]]:
    lengths = values.offsets[rows + 1] - values.offsets[rows]
    of_length = (f"length({name})", lengths)
    if values.kind != "str" or values.inner or lengths.max(initial=0) > _MOST_TEXT_BYTES:
        return [of_length]
    return [(name, np.array(values.take(rows).rows(), object)), of_length]


def _of_objects(name: str, values: Array) -> list[tuple[str, Array]]:
    plain = [
        value.encode() if isinstance(value, str) else value for value in values.reshape(len(values), -1)[:, 0]
    ]
    lengths = np.array([len(value) if hasattr(value, "__len__") else math.nan for value in plain], np.float64)
    texts = [value if value is None or isinstance(value, bytes) else None for value in plain]
    if np.nanmax(lengths, initial=0) > _MOST_TEXT_BYTES:
        return [(f"length({name})", lengths)]
    shown = [None if value is None else value.decode("utf-8", "replace") for value in texts]
    return [(name, np.array(shown, object)), (f"length({name})", lengths)]


def _of_arrow(name: str, column: Any, known: Collection[str]) -> dict[str, Array]:
    """Nulls become missing values of each measure."""
    nulls, ragged = column.null_count, f"length({name})" in known
    plan = Column(name=name, role="feature", allow_nan=True, ragged=ragged)
    values = read_column(column.drop_null() if nulls else column, plan, where=lambda row: row)
    missing = {kind: np.full(nulls, None if kind == "O" else math.nan, kind) for kind in ("O", "f8")}
    return {
        measure: np.concatenate([one, missing["O" if one.dtype == object else "f8"]]) if nulls else one
        for measure, one in measured({name: values}).items()
    }


def _of_texts(values: Array, rows: int, *, cut: bool) -> Summary | None:
    """None for texts that are not categories: what they say is nobody's business."""
    counts = Counter(value for value in values.tolist() if value is not None)
    if len(counts) > _MOST_CATEGORIES and not cut:
        return None
    present = counts.total()
    most = counts.most_common(_MOST_CATEGORIES)
    shares: dict[Category, float] = {value: count / present for value, count in most}
    missing = 1 - present / len(values) if len(values) else 0.0
    return Summary(rows=rows, sampled=len(values), missing=missing, categories=shares)


def _of_numbers(measures: Sequence[Array], rows: int) -> list[Summary]:
    """All at once: most of the time of one measure would be that of calling numpy."""
    sampled = len(measures[0]) if measures else 0
    if not sampled:
        return [Summary(rows=rows, sampled=0, categories={}) for _ in measures]
    values = np.stack(measures)
    if values.dtype.kind != "f":
        values = values.astype(np.float64)
    if not np.isfinite(values).all():
        values[np.isinf(values)] = np.nan
    values.sort(axis=1)  # NaN last
    present = sampled - np.isnan(values).sum(axis=1)
    places = np.ceil(np.linspace(0, 1, POINTS + 1) * present[:, None]).astype(np.int64) - 1
    points = np.take_along_axis(values, np.maximum(places, 0), axis=1).astype(np.float64).tolist()
    starts = np.concatenate([np.ones((len(values), 1), bool), values[:, 1:] != values[:, :-1]], axis=1)
    distinct = starts.sum(axis=1) - (sampled - present) + (present == 0)
    with np.errstate(over="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a measure without a value
        whole = bool((present == sampled).all())
        mean, std = (
            np.asarray(of(values, axis=1, dtype=np.float64)).tolist()
            for of in ((np.mean, np.std) if whole else (np.nanmean, np.nanstd))
        )
    return [
        Summary(
            rows=rows,
            sampled=sampled,
            missing=1 - count / sampled,
            mean=mean[i] if math.isfinite(std[i]) else None,
            std=std[i] if math.isfinite(std[i]) else None,
            quantiles=tuple(points[i]) if count else (),
            categories=_few(values[i, :count], starts[i, :count])
            if distinct[i] <= _MOST_CATEGORIES
            else None,
        )
        for i, count in enumerate(present.tolist())
    ]


def _few(values: Array, starts: Array) -> dict[Category, float]:
    places = np.flatnonzero(starts)
    counts: list[float] = (np.diff([*places.tolist(), len(values)]) / max(1, len(values))).tolist()
    shares: dict[Category, float] = defaultdict(float)
    for value, share in zip(values[places].tolist(), counts, strict=True):
        # A float32 and a float64 of the same text are the same category.
        shares[value if value.is_integer() else float(f"{value:.6g}")] += share
    return dict(shares)


def _merged(parts: Sequence[Summary]) -> Summary:
    rows = [part.rows for part in parts]
    present = np.array([part.rows * (1 - part.missing) for part in parts])
    whole = float(present.sum())
    weighted = [
        (part, float(weight) / whole) for part, weight in zip(parts, present, strict=True) if weight > 0
    ]
    mean = std = None
    if weighted and all(part.mean is not None and part.std is not None for part, _ in weighted):
        mean = sum(weight * (part.mean or 0.0) for part, weight in weighted)
        spread = sum(w * ((p.std or 0.0) ** 2 + ((p.mean or 0.0) - mean) ** 2) for p, w in weighted)
        std = math.sqrt(spread)
    return Summary(
        rows=sum(rows),
        sampled=sum(part.sampled for part in parts),
        missing=1 - whole / sum(rows) if sum(rows) else 0.0,
        mean=mean,
        std=std,
        quantiles=_quantiles(weighted),
        categories=_categories(weighted),
    )


def _quantiles(weighted: Sequence[tuple[Summary, float]]) -> tuple[float, ...]:
    if not weighted or not all(part.quantiles for part, _ in weighted):
        return ()
    values = np.unique(np.concatenate([part.quantiles for part, _ in weighted]))
    ranks = np.sum([weight * part.rank(values) for part, weight in weighted], axis=0)
    wanted = np.linspace(0, 1, POINTS + 1)
    places = np.minimum(np.searchsorted(ranks, wanted - 1e-9), len(values) - 1)
    return tuple(values[places].tolist())


def _categories(weighted: Sequence[tuple[Summary, float]]) -> dict[Category, float] | None:
    shares: dict[Category, float] = defaultdict(float)
    for part, weight in weighted:
        if part.categories is None:
            return None
        for value, share in part.categories.items():
            shares[value] += weight * share
    return dict(shares) if len(shares) <= _MOST_CATEGORIES else None


def _summaries(content: Mapping[str, Any]) -> dict[str, Summary]:
    if len(content) > MOST_MEASURES or any(len(name) > _MOST_NAME for name in content):
        raise ValueError(f"more than {MOST_MEASURES} columns, or names of more than {_MOST_NAME} characters")
    return {name: Summary.from_json(one) for name, one in content.items()}


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:40]} is not a number")
    return float(value)


def _share(value: Any) -> float:
    if not 0 <= _number(value) <= 1.001:
        raise ValueError(f"{value} is not a share")
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{str(value)[:40]} is not a count")
    return value


def _category(value: Any) -> Category:
    return value[: 2 * _MOST_TEXT_BYTES] if isinstance(value, str) else _number(value)


def _short(value: float) -> float:
    return float(f"{value:.9g}")
