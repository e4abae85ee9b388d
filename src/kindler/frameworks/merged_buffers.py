"""Merges buffers that training changes, such as BatchNorm's statistics, over ranks.

Floating point becomes the mean weighted by rows, a variance that of all rows: with w a rank's share,
m = sum(w m_r) and v = sum(w (v_r + (m_r - m)^2)). Integers and flags become the largest, others rank 0's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from kindler.collective import Array, Collective

_Average = Callable[[list[Array]], list[Array]]
_COUNTERS = "iub"


def merge_over_ranks(
    collective: Collective, own: Mapping[str, Array], rows: int, mean_of: Mapping[str, str]
) -> dict[str, Array]:
    """All ranks call it with the same names."""
    floats = {name: array.astype(np.float64) for name, array in own.items() if _is_float(array)}
    counters = {name: array for name, array in own.items() if array.dtype.kind in _COUNTERS}
    others = {name: array for name, array in own.items() if name not in floats and name not in counters}
    merged: dict[str, Array] = {}
    if floats and collective.sum([np.array([rows], np.int64)])[0][0]:
        merged |= _joint(floats, mean_of, lambda arrays: collective.mean(arrays, float(rows)))
    if counters:
        merged |= _largest(collective, counters)
    if others:
        merged |= dict(zip(others, collective.broadcast(list(others.values())), strict=True))
    return {name: array.astype(own[name].dtype, copy=False) for name, array in merged.items()}


def merge_parts(
    parts: Sequence[Mapping[str, Array]], rows: Sequence[int], mean_of: Mapping[str, str]
) -> dict[str, Array]:
    """For saved buffers of former ranks; one may lack some, and one without rows does not count."""
    merged: dict[str, Array] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        known = [(part, count) for part, count in zip(parts, rows, strict=True) if count and name in part]
        if not known:
            continue
        values = np.stack([part[name] for part, _ in known])
        if not _is_float(values):
            merged[name] = values.max(axis=0) if values.dtype.kind in _COUNTERS else values[0]
            continue
        stacked = {name: values.astype(np.float64)}
        mean = mean_of.get(name)
        if mean is not None and all(mean in part for part, _ in known):
            stacked[mean] = np.stack([part[mean] for part, _ in known]).astype(np.float64)
        counts = np.array([count for _, count in known], np.float64)
        joint = _joint(stacked, mean_of, partial(_weighted, counts / counts.sum()))
        merged[name] = joint[name].astype(values.dtype)
    return merged


def mean_by_name(name: str) -> str | None:
    for variance, mean in (("moving_variance", "moving_mean"), ("running_var", "running_mean")):
        if variance in name:
            return name.replace(variance, mean)
    return None


def _joint(values: Mapping[str, Array], mean_of: Mapping[str, str], average: _Average) -> dict[str, Array]:
    spread = [name for name in values if mean_of.get(name) in values]
    plain = [name for name in values if name not in spread]
    merged = dict(zip(plain, average([values[name] for name in plain]), strict=True)) if plain else {}
    if spread:
        about = [values[n] + np.square(values[mean_of[n]] - merged[mean_of[n]]) for n in spread]
        merged |= dict(zip(spread, average(about), strict=True))
    return merged


def _weighted(shares: Array, arrays: list[Array]) -> list[Array]:
    return [np.tensordot(shares, array, axes=1) for array in arrays]


def _largest(collective: Collective, own: Mapping[str, Array]) -> dict[str, Array]:
    # Only sums travel: each rank fills its own line of a table of zeros.
    flat = np.concatenate([array.reshape(-1).astype(np.int64) for array in own.values()])
    table = np.zeros((collective.size, flat.size), np.int64)
    table[collective.rank] = flat
    ends = np.cumsum([array.size for array in own.values()])[:-1]
    parts = np.split(collective.sum([table])[0].max(axis=0), ends)
    return {name: part.reshape(own[name].shape) for name, part in zip(own, parts, strict=True)}


def _is_float(array: Array) -> bool:
    return array.dtype.kind == "f" or "float" in array.dtype.name  # as bfloat16, which numpy has no kind for
