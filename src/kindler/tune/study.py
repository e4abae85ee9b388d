"""What a search found: its trials, the best of them, and the model that it trained."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from kindler.errors import ConfigError, MissingExtraError, NotFittedError
from kindler.html import table
from kindler.tune.space import Space
from kindler.tune.storage import LOST
from kindler.tune.subjects import Subject

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_STATES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "cut short",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


class Best:
    """The best model so far: in memory, and in the study's folder where it has one."""

    def __init__(self, subject: Subject, space: Space, folder: Path | None) -> None:
        self._subject, self._space, self._folder = subject, space, folder
        self._number: int | None = None
        self._value = 0.0
        self._trained: Any = None

    def values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a trial, as the model got them."""
        return self._space.recorded(params)

    def offer(self, number: int, value: float, trained: Any) -> None:
        """Keep what a trial trained if it is better than what is kept."""
        sign = 1 if self._subject.direction == "min" else -1
        if self._number is not None and sign * value >= sign * self._value:
            return
        before, self._number, self._value, self._trained = self._number, number, value, trained
        if self._folder is None:
            return
        self._subject.save(trained, self._path(number))
        if before is not None:
            _remove(self._path(before))

    def get(self, trial: FrozenTrial) -> Any:
        """What a trial trained.

        Raises:
            NotFittedError: It is not kept.
        """
        if trial.number == self._number and self._trained is not None:
            return self._trained
        if self._folder is None or not self._path(trial.number).exists():
            raise NotFittedError(
                f"the model of trial {trial.number}, which another process trained, was not kept.\n"
                "Hint: search(..., folder=...) keeps the best one."
            )
        facts = trial.user_attrs.get("facts", {})
        return self._subject.load(self._path(trial.number), self.values(trial.params), facts)

    def go_on_from(self, study: optuna.Study) -> None:
        """Compare later trials with the best one of an earlier process, if there was one."""
        finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if finished:
            trial = study.best_trial
            self._number, self._value = trial.number, float(trial.value or 0.0)

    def _path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"trial-{number}"


class Study:
    """The trials of a search.

    Attributes:
        optuna: Optuna's own study, for all that it can do besides.
    """

    def __init__(self, study: optuna.Study, best: Best) -> None:
        self.optuna = study
        self._best = best

    @property
    def trials(self) -> list[dict[str, Any]]:
        """A row for each trial: number, state, value, params, epochs, seconds, error."""
        return [self._row(trial) for trial in self.optuna.get_trials(deepcopy=False)]

    def _row(self, trial: FrozenTrial) -> dict[str, Any]:
        reported = trial.intermediate_values
        value = trial.value if trial.value is not None else reported[max(reported)] if reported else None
        error = trial.user_attrs.get("error")
        lost = trial.user_attrs.get(LOST)
        return {
            "number": trial.number,
            "state": "lost" if lost else _STATES[trial.state],
            "value": value,
            "params": self._best.values(trial.params),
            "epochs": max(reported, default=0),
            "seconds": trial.user_attrs.get("seconds"),
            "error": "the driver died or was interrupted" if lost else error,
        }

    @property
    def best_trial(self) -> dict[str, Any]:
        """The row of the best finished trial.

        Raises:
            NotFittedError: No trial was finished.
        """
        return self._row(self._best_trial())

    @property
    def best_params(self) -> dict[str, Any]:
        """Its values."""
        return self._best.values(self._best_trial().params)

    @property
    def best_value(self) -> float:
        """Its figure."""
        return float(self._best_trial().value or 0.0)

    @property
    def best_estimator(self) -> Any:
        """The model that it trained, ready to predict: an `Estimator`, or what a stage's `fit` returned.

        Raises:
            NotFittedError: Another process trained it, and it was not kept in a folder.
        """
        return self._best.get(self._best_trial())

    def _best_trial(self) -> FrozenTrial:
        try:
            return self.optuna.best_trial
        except ValueError as exc:
            raise NotFittedError("no trial of this study was finished.") from exc

    def table(self) -> pd.DataFrame:
        """The trials as a pandas DataFrame, with a column for each parameter."""
        try:
            import pandas as pd
        except ModuleNotFoundError as exc:
            raise MissingExtraError(what="Study.table()", package="pandas", extra="spark") from exc
        return pd.DataFrame([{**row, **row.pop("params")} for row in self.trials]).set_index("number")

    def __repr__(self) -> str:
        rows = self.trials
        said = ", ".join(f"{n} {state}" for state, n in Counter(row["state"] for row in rows).items())
        return f"Study({self.optuna.study_name!r}: {said or 'no trials'})"

    def _repr_html_(self) -> str:
        rows = [{**row, **row.pop("params")} for row in self.trials]
        return table(rows, repr(self)) if rows else escape(repr(self))

    def plot(self, path: str | PathLike[str] | None = None) -> Figure:
        """Plot the figure of each trial, how it went over epochs, and how it depends on each parameter.

        Args:
            path: A file to save the plot to.

        Raises:
            ConfigError: No trial has a figure yet.
        """
        try:
            from kindler.tune.plots import draw
        except ModuleNotFoundError as exc:
            raise MissingExtraError(what="Study.plot()", package="matplotlib", extra="plot") from exc
        if not any(row["value"] is not None for row in self.trials):
            raise ConfigError("nothing to plot: no trial of this study has a figure.")
        figure = draw(self.optuna, self.trials)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
