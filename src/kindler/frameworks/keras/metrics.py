"""Metrics over all ranks: their variables are sums, so those of all ranks add up to one process's.

A metric starts from its reset state, and every row adds to it; what several ranks added is the sum of what
each did. That holds for all of Keras's own metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kindler.frameworks.keras.state import pack, unpack, value_of

__all__ = ["Tallies"]

Array = np.ndarray[Any, np.dtype[Any]]


class Tallies:
    """The metrics of one built model; made while they are in their reset state.

    Attributes:
        rows: How many rows they have seen, where the replica was stepped; Keras's own loop does not say.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.rows = 0
        model.reset_metrics()
        self._blank = [value_of(variable) for variable in self.variables]

    @property
    def variables(self) -> list[Any]:
        """The variables of all metrics, each once."""
        found = {id(v): v for metric in self._model.metrics for v in metric.variables}
        return list(found.values())

    def take(self) -> bytes:
        """This rank's part."""
        return pack({"rows": self.rows}, [value_of(variable) for variable in self.variables])

    def reset(self) -> None:
        """Count from nothing."""
        self._model.reset_metrics()
        self.rows = 0

    def joined(self, parts: Sequence[bytes]) -> bytes:
        """One part that stands for all ranks'."""
        if len(parts) == 1:
            return parts[0]
        found = [unpack(part) for part in parts]
        sums = [b + sum(arrays[n] - b for _, arrays in found) for n, b in enumerate(self._blank)]
        return pack({"rows": sum(fields["rows"] for fields, _ in found)}, sums)

    def load(self, joined: bytes) -> dict[str, Any]:
        """What `joined` made, as numbers; the metrics hold that state afterwards.

        A metric that nobody updated is left out: a train step of the user's own may return a "loss" that it
        computed itself.
        """
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
        """Hold what several ranks counted, given as the values of `variables` on each."""
        for number, (variable, blank) in enumerate(zip(self.variables, self._blank, strict=True)):
            variable.assign(blank + sum(arrays[number] - blank for arrays in parts))

    def figures(self) -> dict[str, float]:
        """The metrics' present results, as plain numbers."""
        return {name: plain(value) for name, value in self._results().items()}

    def _results(self) -> dict[str, Any]:
        if hasattr(self._model, "get_metrics_result"):
            return dict(self._model.get_metrics_result())
        return {metric.name: metric.result() for metric in self._model.metrics}


def plain(value: Any) -> Any:
    """A tensor of one number as that number; more than one as a list."""
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    return array.item() if array.size == 1 else array.tolist()
