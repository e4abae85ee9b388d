"""Metrics over all ranks: their variables are sums, so those of all ranks add up to one process's.

The user's own metrics are tried on the first rows; `merge_over_workers = {"peak": "max"}` merges otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kindler.errors import ConfigError
from kindler.frameworks.keras.state import pack, unpack, value_of

Array = np.ndarray[Any, np.dtype[Any]]

_KERAS = ("keras", "tf_keras", "tensorflow")
UNTRIED = (
    "custom metrics could not be checked, because only the model's own train step updates them. With several"
    " workers the variables of metrics are added up: keep sums in them."
)
_OTHERWISE: dict[str, Callable[..., Any]] = {"max": np.maximum.reduce, "min": np.minimum.reduce}


class Tallies:
    """Create it while the metrics are reset. Keras's own loop does not count `rows`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.rows = 0
        model.reset_metrics()
        self._blank = [value_of(variable) for variable in self.variables]

    @property
    def variables(self) -> list[Any]:
        found = {id(v): v for metric in self._model.metrics for v in metric.variables}
        return list(found.values())

    def take(self) -> bytes:
        return pack({"rows": self.rows}, [value_of(variable) for variable in self.variables])

    def reset(self) -> None:
        self._model.reset_metrics()
        self.rows = 0

    def joined(self, parts: Sequence[bytes]) -> bytes:
        if len(parts) == 1:
            return parts[0]
        found = [unpack(part) for part in parts]
        merged = self._merged([arrays for _, arrays in found])
        return pack({"rows": sum(fields["rows"] for fields, _ in found)}, merged)

    def _merged(self, parts: Sequence[Sequence[Array]]) -> list[Array]:
        rules = {
            id(variable): _rule(metric, variable)
            for metric in _each(self._model.metrics)
            for variable in metric.variables
        }
        merged = []
        for number, (variable, blank) in enumerate(zip(self.variables, self._blank, strict=True)):
            values = [arrays[number] for arrays in parts]
            rule = rules.get(id(variable))
            merged.append(rule(values) if rule else blank + sum(value - blank for value in values))
        return merged

    def try_out(
        self, judge: Callable[[Sequence[slice]], None], rows: int, *, own_step: bool = False
    ) -> list[str]:
        """Raises if the user's own metrics cannot be merged; returns warnings about others."""
        own = [metric for metric in _each(self._model.metrics) if _is_own(metric)]
        if not own or rows < 2:
            return []
        cut = max(1, rows // 3)
        first, rest = slice(0, cut), slice(cut, rows)
        (a, _), (b, _), (both, results), (_, at_once) = (
            self._after(judge, parts, own) for parts in ([first], [rest], [first, rest], [slice(0, rows)])
        )
        self.reset()
        places = {id(variable): number for number, variable in enumerate(self.variables)}
        merged = self._merged([a, b])
        for metric in own:
            for number in (places[id(variable)] for variable in metric.variables):
                if not _close(merged[number], both[number]):
                    raise ConfigError(_cannot_merge(metric, self.variables[number], a, b, both, number))
        compared = zip(own, results, at_once, strict=True)
        by_batch = [_by_batch(metric) for metric, value, whole in compared if not _close(value, whole)]
        numbers = [[places[id(variable)] for variable in metric.variables] for metric in own]
        idle = any(all(np.array_equal(both[n], self._blank[n]) for n in own_ones) for own_ones in numbers)
        return [*by_batch, *([UNTRIED] if own_step and idle else [])]

    def _after(
        self, judge: Callable[[Sequence[slice]], None], parts: Sequence[slice], own: Sequence[Any]
    ) -> tuple[list[Array], list[Array]]:
        judge(parts)
        results = [np.asarray(plain(metric.result())) for metric in own]
        return [value_of(variable) for variable in self.variables], results

    def load(self, joined: bytes) -> dict[str, Any]:
        """Leaves out metrics that nobody updated: a user's train_step may return a "loss" of its own."""
        fields, arrays = unpack(joined)
        self.rows = fields["rows"]
        untouched = set()
        for number, variable in enumerate(self.variables):
            merged = arrays[number]
            if np.array_equal(merged, self._blank[number]):
                untouched.add(id(variable))
            if not np.array_equal(merged, value_of(variable)):
                variable.assign(merged)
        idle = {
            metric.name
            for metric in self._model.metrics
            if metric.variables and all(id(variable) in untouched for variable in metric.variables)
        }
        return {name: figure for name, figure in self.figures().items() if name not in idle}

    def load_sum(self, parts: Sequence[Sequence[Array]]) -> None:
        for variable, value in zip(self.variables, self._merged(parts), strict=True):
            variable.assign(value)

    def figures(self) -> dict[str, float]:
        return {name: plain(value) for name, value in self._results().items()}

    def _results(self) -> dict[str, Any]:
        if hasattr(self._model, "get_metrics_result"):
            return dict(self._model.get_metrics_result())
        return {metric.name: metric.result() for metric in self._model.metrics}


def plain(value: Any) -> Any:
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    return array.item() if array.size == 1 else array.tolist()


def _each(metrics: Sequence[Any]) -> Iterator[Any]:
    for metric in metrics:
        yield metric
        yield from _each(getattr(metric, "metrics", ()))


def _is_own(metric: Any) -> bool:
    function = getattr(metric, "_fn", None)
    names = [type(metric).__module__, *([] if function is None else [getattr(function, "__module__", "")])]
    return any(str(name).partition(".")[0] not in _KERAS for name in names)


def _rule(metric: Any, variable: Any) -> Callable[..., Any] | None:
    """None adds the ranks' values."""
    rule = dict(getattr(metric, "merge_over_workers", None) or {}).get(_name(variable), "sum")
    if rule != "sum" and rule not in _OTHERWISE:
        raise ConfigError(
            f"{type(metric).__name__}.merge_over_workers: the variable {_name(variable)!r} has {rule!r};"
            " expected 'sum', 'max' or 'min'."
        )
    return _OTHERWISE.get(rule)


def _name(variable: Any) -> str:
    return str(variable.name).rpartition("/")[2].partition(":")[0]


def _close(one: Any, other: Any) -> bool:
    if np.shape(one) != np.shape(other):
        return False
    scale = float(np.max(np.abs(other), initial=0.0)) if np.isfinite(other).all() else 0.0
    return bool(np.allclose(one, other, rtol=1e-4, atol=1e-5 * scale, equal_nan=True))


def _cannot_merge(
    metric: Any, variable: Any, a: Sequence[Array], b: Sequence[Array], both: Sequence[Array], number: int
) -> str:
    name, values = _name(variable), [np.asarray(part[number]).reshape(-1)[:1] for part in (a, b, both)]
    one, two, three = (f"{value[0]:.6g}" if value.size else "nothing" for value in values)
    return (
        f"the metric {metric.name!r} ({type(metric).__name__}) cannot be merged over workers: its counts for "
        "some rows and for others do not add up to its count for all of them. Its variable"
        f" {name!r} was {one} after some rows, {two} after others, and {three} after both.\n"
        "Hint: keep sums in variables, a total and a count for a mean, and divide in result(). For a largest "
        f"or smallest value declare this in the class: merge_over_workers = {{{name!r}: 'max'}} (or 'min')."
        " Or use workers=1."
    )


def _by_batch(metric: Any) -> str:
    return (
        f"the metric {metric.name!r} depends on how rows are batched: it is not a mean over rows."
        " With several workers it is computed on each worker's part of a batch and averaged.\n"
        "Hint: let it return one value for each row, or accumulate what the result needs in a "
        "keras.metrics.Metric."
    )
