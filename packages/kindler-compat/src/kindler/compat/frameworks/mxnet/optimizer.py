"""MXNet's optimizer for one replica: applies gradients; all that it remembers is arrays and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kindler.collective import Array
from kindler.compat.frameworks.mxnet.library import mx
from kindler.errors import ConfigError

_COUNTS = "optimizer counts"


class Steps:
    """Applies gradients to parameters."""

    def __init__(self, optimizer: Any, parameters: Sequence[Any]) -> None:
        self.optimizer, self._parameters = optimizer, list(parameters)
        # Gradients are means already.
        optimizer.rescale_grad = 1.0
        self._updater = mx.optimizer.get_updater(optimizer)

    def apply(self, gradients: Sequence[Array]) -> None:
        for place, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            weight = parameter.data()
            self._updater(place, mx.nd.array(gradient, ctx=weight.context, dtype=weight.dtype), weight)

    def pass_step(self) -> None:
        """Count a step that moves nothing."""
        optimizer = self.optimizer
        counts = optimizer._index_update_count
        counts.update({place: counts.get(place, 0) + 1 for place in range(len(self._parameters))})
        optimizer.num_update = max(optimizer.num_update, *counts.values())

    def rates(self) -> list[float]:
        """The learning rate, if it is not a schedule's."""
        return [] if self.optimizer.lr_scheduler is not None else [float(self.optimizer.lr)]

    def set_rates(self, rates: Sequence[float]) -> None:
        for rate in rates[:1]:
            self.optimizer.set_learning_rate(float(rate))

    def variables(self) -> dict[str, Array]:
        """What the next step depends on besides the parameters."""
        optimizer, states = self.optimizer, self._updater.states
        counts = [optimizer._index_update_count.get(i, 0) for i in range(len(self._parameters))]
        arrays = {_COUNTS: np.array([optimizer.num_update, *counts], np.int64)}
        for place, state in states.items():
            for number, leaf in enumerate(_leaves(state)):
                arrays[f"optimizer {place}.{number}"] = leaf.asnumpy()
        schedule = _numbers(optimizer.lr_scheduler)
        names = sorted(schedule)
        arrays |= {f"schedule {name}": np.array(schedule[name]) for name in names}
        arrays["learning rate"] = np.array(float(optimizer.lr))
        return arrays

    def load_variables(self, arrays: Mapping[str, Array]) -> None:
        """Go on from `variables`."""
        optimizer = self.optimizer
        total, *counts = arrays[_COUNTS].tolist()
        optimizer.num_update = total
        optimizer._index_update_count.update({i: n for i, n in enumerate(counts) if n})
        for place, parameter in enumerate(self._parameters):
            found = [arrays[name] for name in _numbered(arrays, f"optimizer {place}.")]
            if not counts[place]:
                continue
            state = optimizer.create_state_multi_precision(place, parameter.data())
            leaves = list(_leaves(state))
            if [leaf.shape for leaf in leaves] != [array.shape for array in found]:
                raise ConfigError(
                    "this state was made with another optimizer: it has"
                    f" {[array.shape for array in found]} for a parameter where this one has"
                    f" {[leaf.shape for leaf in leaves]}."
                )
            for leaf, array in zip(leaves, found, strict=True):
                leaf[:] = mx.nd.array(array, dtype=leaf.dtype)
            self._updater.states[place], self._updater.states_synced[place] = state, True
        for name, value in _numbers(optimizer.lr_scheduler).items():
            if f"schedule {name}" in arrays:
                setattr(optimizer.lr_scheduler, name, type(value)(arrays[f"schedule {name}"].item()))
        if optimizer.lr_scheduler is None:
            optimizer.lr = float(arrays["learning rate"])


def _leaves(state: Any) -> Iterator[Any]:
    """The arrays of what an optimizer remembers of one parameter: None, an array, or nested tuples."""
    if isinstance(state, list | tuple):
        for part in state:
            yield from _leaves(part)
    elif state is not None:
        yield state


def _numbered(arrays: Mapping[str, Array], prefix: str) -> list[str]:
    return sorted((name for name in arrays if name.startswith(prefix)), key=lambda n: int(n[len(prefix) :]))


def _numbers(schedule: Any) -> dict[str, Any]:
    """What a schedule of learning rates has of numbers: where it stands."""
    known = {} if schedule is None else vars(schedule)
    return {n: v for n, v in known.items() if isinstance(v, int | float) and not isinstance(v, bool)}
