"""A study: its trials, the best of them and the model that it trained, and where all this is kept.

A study is run by one driver at a time. A driver that died leaves trials that look as if they still ran: the
next one marks them as failed, and runs their values again.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections import Counter
from contextlib import suppress
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from kindler.errors import ConfigError, MissingExtraError, NotFittedError
from kindler.html import table
from kindler.tune.space import Space
from kindler.tune.subjects import Subject

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

LOST = "kindler:lost"
_OWNER = "kindler:owner"
_STATES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "cut short",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


class Study:
    """The trials of a search.

    Attributes:
        optuna: Optuna's own study, for its other features.
    """

    def __init__(self, study: optuna.Study, subject: Subject, space: Space, folder: Path | None) -> None:
        self.optuna = study
        self._subject, self._space, self._folder = subject, space, folder
        self._number: int | None = None  # of the best trial so far, in an earlier process perhaps
        self._value = 0.0
        self._trained: Any = None
        if study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            self._number, self._value = study.best_trial.number, float(study.best_trial.value or 0.0)

    def _offer(self, number: int, value: float, trained: Any) -> None:
        """Keep what a trial trained if it is the best so far: in memory, and in the study's folder."""
        sign = 1 if self._subject.direction == "min" else -1
        if self._number is not None and sign * value >= sign * self._value:
            return
        before, self._number, self._value, self._trained = self._number, number, value, trained
        if self._folder is None:
            return
        self._subject.save(trained, self._folder / f"trial-{number}")
        if before is not None:
            _remove(self._folder / f"trial-{before}")

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
            "params": self._space.recorded(trial.params),
            "epochs": max(reported, default=0),
            "seconds": trial.user_attrs.get("seconds"),
            "error": "the driver died or was interrupted" if lost else error,
        }

    @property
    def best_trial(self) -> dict[str, Any]:
        """The row of the best finished trial.

        Raises:
            NotFittedError: No trial has finished.
        """
        return self._row(self._best_trial())

    @property
    def best_params(self) -> dict[str, Any]:
        """The parameters of the best trial."""
        return self._space.recorded(self._best_trial().params)

    @property
    def best_value(self) -> float:
        """The metric of the best trial."""
        return float(self._best_trial().value or 0.0)

    @property
    def best_estimator(self) -> Any:
        """The model that the best trial trained, ready to predict: an `Estimator`, or the result of a stage's
        `fit`.

        Raises:
            NotFittedError: Another process trained it, and it was not saved in a folder.
        """
        trial = self._best_trial()
        if trial.number == self._number and self._trained is not None:
            return self._trained
        path = None if self._folder is None else self._folder / f"trial-{trial.number}"
        if path is None or not path.exists():
            raise NotFittedError(
                f"the model of trial {trial.number}, which another process trained, was not kept.\n"
                "Hint: search(..., folder=...) keeps the best one."
            )
        values = self._space.recorded(trial.params)
        return self._subject.load(path, values, trial.user_attrs.get("facts", {}))

    def _best_trial(self) -> FrozenTrial:
        try:
            return self.optuna.best_trial
        except ValueError as exc:
            raise NotFittedError("no trial of this study has finished.") from exc

    def table(self) -> pd.DataFrame:
        """The trials as a pandas DataFrame, with a column for each parameter."""
        try:
            import pandas as pd
        except ModuleNotFoundError as exc:
            raise MissingExtraError(what="Study.table()", package="pandas", extra="spark") from exc
        return pd.DataFrame(self._rows()).set_index("number")

    def __repr__(self) -> str:
        rows = self.trials
        said = ", ".join(f"{n} {state}" for state, n in Counter(row["state"] for row in rows).items())
        return f"Study({self.optuna.study_name!r}: {said or 'no trials'})"

    def _rows(self) -> list[dict[str, Any]]:
        rows = self.trials
        for row in rows:
            row |= row.pop("params")
        return rows

    def _repr_html_(self) -> str:
        rows = self._rows()
        return table(rows, repr(self)) if rows else escape(repr(self))

    def plot(self, path: str | PathLike[str] | None = None) -> Figure:
        """Plot the metric of each trial, its course over the epochs, and its dependence on each parameter.

        Args:
            path: A file to save the plot to.

        Raises:
            ConfigError: No trial has a metric value yet.
        """
        try:
            from kindler.tune.plots import draw
        except ModuleNotFoundError as exc:
            raise MissingExtraError(what="Study.plot()", package="matplotlib", extra="plot") from exc
        if not any(row["value"] is not None for row in self.trials):
            raise ConfigError("nothing to plot: no trial of this study has a metric value.")
        figure = draw(self.optuna, self.trials)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def storage_url(storage: str | None, folder: str | PathLike[str] | None) -> str | None:
    """The URL of a study's database; None keeps it in memory."""
    if storage is None:
        return None if folder is None else f"sqlite:///{Path(folder).absolute() / 'study.db'}"
    scheme, separator, rest = storage.partition("://")
    if separator and scheme in ("postgresql", "postgres", "postgresql+psycopg"):
        try:
            import psycopg  # noqa: F401
        except ModuleNotFoundError as exc:
            raise MissingExtraError(
                what="a study in PostgreSQL", package="psycopg", extra="postgres"
            ) from exc
        return f"postgresql+psycopg://{rest}"
    if not separator or scheme != "sqlite":
        raise ConfigError(f"storage={storage!r}: expected sqlite:///FILE or postgresql://USER@HOST/DATABASE.")
    return storage


def claim(study: optuna.Study) -> None:
    """Become the driver of a study; raises ConfigError if another process of this machine is."""
    owner = study.user_attrs.get(_OWNER) or {}
    is_other = owner.get("host") == socket.gethostname() and owner.get("pid") != os.getpid()
    if is_other and owner.get("since") is not None and _began(int(owner["pid"])) == owner["since"]:
        raise ConfigError(
            f"the study {study.study_name!r} is being run by process {owner['pid']} of this machine.\n"
            "Hint: wait for it, or choose another name=."
        )
    pid = os.getpid()
    study.set_user_attr(_OWNER, {"host": socket.gethostname(), "pid": pid, "since": _began(pid)})


def release(study: optuna.Study) -> None:
    study.set_user_attr(_OWNER, None)


def retake(study: optuna.Study) -> int:
    """Mark the trials that a dead driver left as failed, and queue their values again; returns how many."""
    left = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    for trial in left:
        study._storage.set_trial_user_attr(trial._trial_id, LOST, True)
        study.tell(trial.number, state=TrialState.FAIL)
        if trial.params:
            study.enqueue_trial(trial.params)
    return len(left)


def _began(pid: int) -> str | None:
    """When a process of this machine was started, in the kernel's own count; None if there is none."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None
