"""What is searched over: estimators, or stages of Spark ML. Both are trained and judged in one call a trial.

A subject does not know of trials, storage or slots: it makes a model of some values, reports what it sees
after each epoch, and can be made again of the same values later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from optuna.distributions import BaseDistribution

from kindler.engine import local
from kindler.errors import ConfigError
from kindler.estimator.estimator import Estimator
from kindler.train.callbacks import DriverCallback
from kindler.train.metric_names import Direction, parse
from kindler.tune.space import Dimension

Report = Callable[[int, float], None]  # an epoch and its metric; raises to end the run
Check = Callable[[], None]  # raises to end the run
Outcome = tuple[float, Any, dict[str, Any]]

_RATE = "learning_rate"


class _Follow(DriverCallback):
    """Reports each epoch of a run, and ends it where it is told to."""

    def __init__(self, metric: str, report: Report, check: Check) -> None:
        self._metric, self._report, self._check = metric, report, check

    def on_run_begin(self, params: Mapping[str, Any]) -> None:
        self._check()

    def on_progress(self, fields: Mapping[str, Any]) -> None:
        self._check()

    def on_epoch_end(self, logs: Mapping[str, Any]) -> None:
        if self._metric in logs:
            self._report(int(logs["epoch"]), float(logs[self._metric]))
        self._check()


@dataclass
class EstimatorSubject:
    """A function of the values that returns an estimator, or an estimator whose config they are."""

    model: Any
    data: Any
    validation_data: Any
    metric: str
    direction: Direction
    fit: dict[str, Any] = field(default_factory=dict)
    slots: int = 1

    def make(self, values: Mapping[str, Any]) -> Estimator:
        own = {name: value for name, value in values.items() if not name.startswith("fit.")}
        if isinstance(self.model, Estimator):
            rate = None if _RATE in self.model.config else own.pop(_RATE, None)
            return self.model.copy(config=own, learning_rate=rate, **self._share(self.model))
        made = self.model(own)
        if not isinstance(made, Estimator):
            raise ConfigError(
                f"the function that is searched over must return a kindler.Estimator; it returned {made!r}."
            )
        share = self._share(made)
        is_same = share == {"workers": made.workers, "settings": made.settings}
        return made if is_same else made.copy(**share)

    def _share(self, estimator: Estimator) -> dict[str, Any]:
        """Trials on one machine share its cores."""
        workers, settings = estimator.workers, estimator.settings
        if self.slots > 1:
            workers = 1 if workers is None else workers
            if settings.threads is None and not hasattr(self.data, "sparkSession"):
                settings = replace(settings, threads=max(1, local.slots() // (self.slots * workers)))
        return {"workers": workers, "settings": settings}

    def run(self, values: Mapping[str, Any], report: Report, check: Check) -> Outcome:
        """Train with these values; returns the metric, what was trained, and facts about it as JSON."""
        estimator = self.make(values)
        chosen = {
            name.removeprefix("fit."): value for name, value in values.items() if name.startswith("fit.")
        }
        options = {"verbose": 0, **self.fit, **chosen}
        callbacks = [*options.pop("callbacks", ()), _Follow(self.metric, report, check)]
        history = estimator.fit(
            self.data, validation_data=self.validation_data, callbacks=callbacks, **options
        )
        rows = [row for row in history if self.metric in row]
        if not rows:
            raise ConfigError(
                f"metric={self.metric!r}: no epoch has it; the history has {history.names}."
                + ("\nHint: pass validation_data." if self.metric.startswith("val_") else "")
            )
        facts = {**estimator._record, "history": list(history)}
        return float(rows[-1][self.metric]), estimator, facts

    def save(self, trained: Estimator, path: Path) -> None:
        trained.save_checkpoint(path)

    def load(self, path: Path, values: Mapping[str, Any], facts: Mapping[str, Any]) -> Estimator:
        estimator = self.make(values)
        return estimator.load_checkpoint(path)._restore_record(facts)


@dataclass
class StageSubject:
    """A stage of Spark ML, or a pipeline of them, judged by an evaluator."""

    stage: Any
    params: dict[str, Any]
    data: Any
    validation_data: Any
    evaluator: Any
    direction: Direction

    @property
    def metric(self) -> str:
        """What the evaluator calls it."""
        named = getattr(self.evaluator, "getMetricName", None)
        return str(named()) if named is not None else "metric"

    def run(self, values: Mapping[str, Any], report: Report, check: Check) -> Outcome:
        check()
        chosen = {self.params[name]: value for name, value in values.items()}
        model = self.stage.fit(self.data, chosen)
        check()
        return float(self.evaluator.evaluate(model.transform(self.validation_data))), model, {}

    def save(self, trained: Any, path: Path) -> None:
        trained.write().overwrite().save(str(path))

    def load(self, path: Path, values: Mapping[str, Any], facts: Mapping[str, Any]) -> Any:
        from pyspark.ml.util import DefaultParamsReader

        return DefaultParamsReader.loadParamsInstance(str(path), self.data.sparkSession)


Subject: TypeAlias = EstimatorSubject | StageSubject


def subject_of(
    model: Any,
    space: Mapping[Any, Any],
    data: Any,
    validation_data: Any,
    *,
    metric: str | None,
    fit: Mapping[str, Any],
    evaluator: Any,
    slots: int,
) -> tuple[Subject, dict[str, Any]]:
    """What is searched over, and the space by names."""
    if hasattr(model, "fitMultiple") and hasattr(model, "explainParams"):
        if evaluator is None or validation_data is None:
            raise ConfigError("a stage is scored by an evaluator: pass evaluator= and validation_data=.")
        if fit or metric is not None:
            raise ConfigError("fit= and metric= are for estimators; a stage has parameters and an evaluator.")
        params = _names(space)
        direction: Direction = "max" if evaluator.isLargerBetter() else "min"
        named = {name: space[param] for name, param in params.items()}
        return StageSubject(model, params, data, validation_data, evaluator, direction), named
    if evaluator is not None:
        raise ConfigError("evaluator= is for stages of Spark ML; an estimator has metrics, see metric=.")
    if not isinstance(model, Estimator) and not callable(model):
        raise ConfigError(
            f"expected an estimator, a function that returns one, or a stage of Spark ML; received {model!r}."
        )
    name, direction = parse(metric or ("val_loss" if validation_data is not None else "loss"))
    fixed = {key: value for key, value in fit.items() if not _is_dimension(value)}
    searched = {f"fit.{key}": value for key, value in fit.items() if _is_dimension(value)}
    wrong = [key for key in space if not isinstance(key, str)]
    if wrong:
        raise ConfigError(f"space: {wrong[0]!r} is not a name; parameters of stages require a stage.")
    subject = EstimatorSubject(
        model, data, validation_data, metric=name, direction=direction, fit=fixed, slots=slots
    )
    return subject, {**space, **searched}


def _is_dimension(value: Any) -> bool:
    return isinstance(value, Dimension | BaseDistribution)


def _names(space: Mapping[Any, Any]) -> dict[str, Any]:
    """Parameters by names that are the same in another process, where their stages have other ids."""
    named: dict[str, Any] = {}
    for param in space:
        if not hasattr(param, "parent"):
            raise ConfigError(f"space: {param!r} is not a parameter of a stage, such as stage.learningRate.")
        base = f"{re.sub('_[0-9a-f]+$', '', str(param.parent))}.{param.name}"
        number, name = 2, base
        while name in named:
            name, number = f"{base}-{number}", number + 1
        named[name] = param
    return named
