"""How rows of now differ from those a model was trained on, and which differences are an alarm.

An alarm needs both: an effect that matters, and one that chance makes once in a million comparisons. A window
of a few hundred rows that has not drifted is thus quiet, however often it is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kindler.data.columns import Array
from kindler.data.statistics import POINTS, Statistics, Summary
from kindler.errors import ConfigError

_LOG_MILLION = math.log(1e6)
_BINS = 10
_RARE = 0.01  # categories below it are one bin
_TINY = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftRule:
    """From when on a difference is an alarm, if it is also no chance.

    Attributes:
        psi: The population stability index of a column over its deciles or categories.
        ks: The Kolmogorov-Smirnov distance of a column of numbers: the largest difference of the ranks.
        missing: The difference of the shares of missing values.
        new: The share of values that are none of the column's categories.
        rows: Fewer rows are never an alarm.
    """

    psi: float = 0.2
    ks: float = 0.1
    missing: float = 0.01
    new: float = 0.01
    rows: int = 200

    def __post_init__(self) -> None:
        for name in ("psi", "ks", "missing", "new"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"DriftRule({name}={getattr(self, name)!r}): must be greater than 0.")
        if self.rows < 1:
            raise ConfigError(f"DriftRule(rows={self.rows}): must be at least 1.")


def drift_of(
    known: Statistics,
    columns: Mapping[str, Summary],
    predictions: Mapping[str, Summary] | None = None,
    *,
    rule: DriftRule | None = None,
) -> dict[str, Any]:
    """Compare rows with the statistics of a model; the report is plain JSON.

    Measures that are only on one side are left out, but for the names of those that the rows lack.
    """
    rule = rule or DriftRule()
    parts = {
        "columns": _compared(known.columns, columns, rule),
        "predictions": _compared(known.predictions, predictions or {}, rule),
    }
    summaries = [*columns.values(), *(predictions or {}).values()]
    every = [item for part in parts.values() for item in part.items()]
    reasons = [f"{name}: {one['alarm']}" for name, one in every if one["alarm"]]
    return {
        "rows": max((one.rows for one in summaries), default=0),
        "sampled": max((one.sampled for one in summaries), default=0),
        "alarm": bool(reasons),
        "reasons": reasons,
        **parts,
        "unknown": [name for name in known.columns if name not in columns],
    }


def _compared(
    known: Mapping[str, Summary], now: Mapping[str, Summary], rule: DriftRule
) -> dict[str, dict[str, Any]]:
    return {name: _difference(known[name], one, rule) for name, one in now.items() if name in known}


def _difference(known: Summary, now: Summary, rule: DriftRule) -> dict[str, Any]:
    bins = _by_category(known, now) if known.categories else _by_decile(known, now)
    expected, found, new = bins
    psi = _psi(expected, found)
    ks = 0.0 if known.categories else _distance(known, now)
    present = now.sampled * (1 - now.missing)
    seen = known.sampled * (1 - known.missing)
    both = present * seen / max(present + seen, 1.0)
    reasons = []
    if now.sampled >= rule.rows:
        if psi > max(rule.psi, _psi_by_chance(len(expected), both)):
            reasons.append(f"PSI {psi:.2f} is above {rule.psi:g}")
        if ks > max(rule.ks, math.sqrt((_LOG_MILLION + math.log(2)) / (2 * max(both, 1.0))) + 2 / POINTS):
            reasons.append(f"the Kolmogorov-Smirnov distance {ks:.2f} is above {rule.ks:g}")
        lost = now.missing
        if abs(lost - known.missing) > rule.missing and _no_chance(lost, known.missing, now, known):
            reasons.append(f"{now.missing:.1%} of the values are missing, and {known.missing:.1%} were")
        if new > rule.new and _no_chance(new, 0.0, now, known):
            reasons.append(f"{new:.1%} of the values are new categories")
    return {
        "psi": round(psi, 4),
        "ks": round(ks, 4),
        "missing": [round(known.missing, 4), round(now.missing, 4)],
        "new": round(new, 4),
        "mean": [known.mean, now.mean],
        "bins": [[round(float(share), 4) for share in side] for side in (expected, found)],
        "alarm": "; ".join(reasons) or None,
    }


def _by_decile(known: Summary, now: Summary) -> tuple[Array, Array, float]:
    """The shares of both in bins that hold a tenth of the known values each; fewer where values repeat."""
    if not known.quantiles or not now.quantiles:
        return np.ones(1), np.ones(1), 0.0
    points = np.asarray(known.quantiles)
    inner = np.linspace(0, len(points) - 1, _BINS + 1).astype(np.int64)[1:-1]
    edges = np.unique(points[inner])
    expected, found = (np.diff([0.0, *one.rank(edges).tolist(), 1.0]) for one in (known, now))
    kept = expected > _TINY
    return expected[kept], found[kept], 0.0


def _by_category(known: Summary, now: Summary) -> tuple[Array, Array, float]:
    """The shares of the known categories, of rare ones together; and what is none of them."""
    shares = known.categories or {}
    found = now.categories
    if found is None or (not found and now.quantiles):  # too many different values to be listed
        found = dict.fromkeys(now.quantiles, 0.0)
        for value in now.quantiles:
            found[value] += 1 / len(now.quantiles)
    common = [value for value, share in shares.items() if share >= _RARE]
    expected = [shares[value] for value in common]
    here = [found.get(value, 0.0) for value in common]
    rest = 1 - sum(expected)
    if rest > _TINY or not common:
        expected, here = [*expected, max(rest, _TINY)], [*here, max(0.0, 1 - sum(here))]
    new = sum(share for value, share in found.items() if value not in shares)
    return np.asarray(expected), np.asarray(here), float(new)


def _psi(expected: Array, found: Array) -> float:
    one, other = np.maximum(expected, _TINY), np.maximum(found, _TINY)
    return float(((other - one) * np.log(other / one)).sum())


def _psi_by_chance(bins: int, rows: float) -> float:
    """What it exceeds once in a million times: it is about a chi-square of this many bins, over the rows."""
    free = max(1, bins - 1)
    return (free + 2 * math.sqrt(free * _LOG_MILLION) + 2 * _LOG_MILLION) / max(rows, 1.0)


def _distance(known: Summary, now: Summary) -> float:
    if not known.quantiles or not now.quantiles:
        return 0.0
    values = np.unique([*known.quantiles, *now.quantiles])
    return float(np.abs(known.rank(values) - now.rank(values)).max())


def _no_chance(share: float, known: float, now: Summary, before: Summary) -> bool:
    """Whether so many of the rows are so by chance less than once in a million times (Chernoff's bound)."""
    expected = min(max((known * before.sampled + 1) / (before.sampled + 2), 1e-9), 1 - 1e-9)
    parts = ((share, expected), (1 - share, 1 - expected))
    return now.sampled * sum(p * math.log(p / q) for p, q in parts if p > 0) > _LOG_MILLION
