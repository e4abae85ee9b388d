"""What a search chooses from: one dimension for each value that differs between trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from kindler.errors import ConfigError

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Dimension:
    """The values that one parameter may take.

    Attributes:
        distribution: What Optuna draws from.
        values: The values themselves, where Optuna draws only their numbers.
    """

    distribution: BaseDistribution
    values: tuple[Any, ...] = ()

    def value(self, drawn: Any) -> Any:
        """The value that Optuna has recorded as `drawn`."""
        return self.values[int(drawn)] if self.values else drawn


def uniform(low: float, high: float, *, step: float | None = None) -> Dimension:
    """A float from `low` to `high`; with `step`, `low` plus a multiple of it."""
    _check_range(low, high)
    return Dimension(FloatDistribution(float(low), float(high), step=step))


def loguniform(low: float, high: float) -> Dimension:
    """A float from `low` to `high`; each order of magnitude is equally likely."""
    _check_range(low, high, positive=True)
    return Dimension(FloatDistribution(float(low), float(high), log=True))


def integer(low: int, high: int, *, step: int = 1, log: bool = False) -> Dimension:
    """An integer from `low` to `high`, both included; `log` favors small ones, as in `loguniform`."""
    _check_range(low, high, positive=log)
    return Dimension(IntDistribution(int(low), int(high), step=step, log=log))


def choice(values: Sequence[Any]) -> Dimension:
    """One of the values, which may be of any type and have no order."""
    kept = tuple(values)
    if not kept:
        raise ConfigError("choice([]): there is nothing to choose from.")
    if all(isinstance(value, _PLAIN) for value in kept):
        return Dimension(CategoricalDistribution(kept))
    return Dimension(CategoricalDistribution(tuple(range(len(kept)))), kept)


class Space:
    """The values of a search by name: dimensions, and values that all trials share."""

    def __init__(self, dimensions: Mapping[str, Any]) -> None:
        self._dimensions = {name: _dimension(name, given) for name, given in dimensions.items()}

    @property
    def searched(self) -> dict[str, Dimension]:
        """What differs between trials."""
        return {name: one for name, one in self._dimensions.items() if isinstance(one, Dimension)}

    def ask(self, study: optuna.Study) -> tuple[optuna.Trial, dict[str, Any]]:
        """A new trial, and its values."""
        trial = study.ask({name: one.distribution for name, one in self.searched.items()})
        return trial, self.recorded(trial.params)

    def recorded(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a trial of which Optuna has recorded these parameters."""
        return {
            name: one.value(params[name]) if isinstance(one, Dimension) else one
            for name, one in self._dimensions.items()
            if not isinstance(one, Dimension) or name in params
        }


def _dimension(name: str, given: Any) -> Any:
    if isinstance(given, BaseDistribution):
        return Dimension(given)
    if isinstance(given, range | set | frozenset) or hasattr(given, "rvs"):
        raise ConfigError(
            f"space[{name!r}]={given!r} is not a dimension.\nHint: tune.choice([...]),"
            " tune.integer(low, high), tune.uniform(low, high) or tune.loguniform(low, high)."
        )
    return given


def _check_range(low: float, high: float, *, positive: bool = False) -> None:
    if not low <= high:
        raise ConfigError(f"the range from {low} to {high} is empty.")
    if positive and low <= 0:
        raise ConfigError(f"a logarithmic range must begin above 0; received {low}.")
