"""The search itself: trials run in parallel in threads of the driver, each of them a normal run.

A run's own workers are where it says: processes of this machine, or tasks of Spark. Optuna chooses values and
says which trials to cut short; `study.py` keeps them, `subjects.py` trains.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import Trial, TrialState

from kindler.engine import local
from kindler.errors import ConfigError, TrainingError
from kindler.tune.space import Space
from kindler.tune.study import LOST, Study, claim, release, retake, storage_url
from kindler.tune.subjects import Subject, subject_of

_log = logging.getLogger(__name__)

_LOOK_S = 0.2
_PRUNERS: dict[Any, Callable[[], Any]] = {
    "median": optuna.pruners.MedianPruner,
    "halving": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
    None: optuna.pruners.NopPruner,
}


class _Stopped(BaseException):
    """Ends the runs of a study that was interrupted; not an error of a trial's."""


def search(
    model: Any,
    space: Mapping[Any, Any],
    data: Any,
    validation_data: Any = None,
    *,
    metric: str | None = None,
    trials: int = 20,
    slots: int | None = None,
    fit: Mapping[str, Any] | None = None,
    evaluator: Any = None,
    sampler: Any = "tpe",
    pruner: Any = "median",
    seed: int = 0,
    folder: str | PathLike[str] | None = None,
    storage: str | None = None,
    name: str = "study",
    timeout_s: float | None = None,
    verbose: int = 1,
) -> Study:
    """Search for the values that give the best model.

    A trial that fails is recorded, and the search continues. With `folder` or `storage`, a search that was
    interrupted, or whose process died, resumes when it is called again, up to `trials` in total.

    Args:
        model: A function that takes a dict of values and returns an `Estimator`; an `Estimator`, whose
            `config` takes the values (and whose learning rate is "learning_rate"); or a stage or pipeline of
            Spark ML.
        space: What to search: names, or parameters of stages, with `tune.uniform`, `tune.loguniform`,
            `tune.integer`, `tune.choice` or a distribution of Optuna. Other values are passed on unchanged.
        data: The training data of each trial.
        validation_data: The data for validation after each epoch.
        metric: The metric of the history by which trials are scored, at their last epoch: "val_loss",
            "max:val_gain". None means "val_loss", or "loss" without `validation_data`.
        trials: Total number of trials of the study; with the sampler "grid", at most the number of grid
            points.
        slots: How many trials run concurrently. None means one per core of this machine, or per slot of
            Spark.
        fit: Other arguments of `Estimator.fit`, which may be searched, too: `fit={"batch_size":
            tune.choice([32, 64])}`.
        evaluator: For stages: an evaluator of Spark ML, which scores the predictions for `validation_data`.
        sampler: "tpe", "random", "grid", or a sampler of Optuna.
        pruner: "median", "halving", "hyperband", a pruner of Optuna, or None to run all trials to the end.
        seed: The seed of the sampler.
        folder: The folder for the study: its database, and the weights of its best trial.
        storage: Another database: "sqlite:///FILE" or "postgresql://USER@HOST/DATABASE".
        name: The study's name in the database.
        timeout_s: No trial starts after this time.
        verbose: 0 disables the report of trials.

    Raises:
        ConfigError: The arguments are invalid.
        TrainingError: No trial finished; the first error is the cause.
    """
    for what, count in (("trials", trials), ("slots", 1 if slots is None else slots)):
        if type(count) is not int or count < 1:
            raise ConfigError(f"{what} must be a whole number of at least 1; received {count!r}.")
    slots = min(slots or _slots(data), trials)
    subject, named = subject_of(
        model,
        space,
        data,
        validation_data,
        metric=metric,
        fit=dict(fit or {}),
        evaluator=evaluator,
        slots=slots,
    )
    chosen = Space(named)
    if not chosen.searched:
        raise ConfigError(f"space={dict(space)!r} has nothing to search, such as tune.uniform(0, 1).")
    points = _grid(chosen)[:trials] if sampler == "grid" else []
    random = partial(optuna.samplers.RandomSampler, seed=seed)
    samplers = {"tpe": partial(_tpe, seed), "random": random, "grid": random}
    place = None if folder is None else Path(folder).absolute()  # Spark may have another working folder
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
    with _quiet_optuna():
        study = optuna.create_study(
            storage=storage_url(storage, place),
            study_name=name,
            sampler=_named("sampler", sampler, samplers),
            pruner=_named("pruner", pruner, _PRUNERS),
            direction="minimize" if subject.direction == "min" else "maximize",
            load_if_exists=True,
        )
        if study.direction.name.lower()[:3] != subject.direction:
            raise ConfigError(
                f"the study {name!r} was created with direction={study.direction.name.lower()!r}.\n"
                "Hint: choose another name= or folder=."
            )
        study.set_user_attr("metric", subject.metric)
        result = Study(study, subject, chosen, place)
        for point in points:
            study.enqueue_trial(point, skip_if_exists=True)
        trials = len(points) or trials
        if verbose:
            best_is = "lowest" if subject.direction == "min" else "highest"
            sys.stderr.write(
                f"searching {', '.join(chosen.searched)} for the {best_is} {subject.metric}:"
                f" {trials} trial{'s' if trials > 1 else ''}, {slots} at a time\n"
            )
        runner = _Runner(result, subject, chosen, verbose=verbose)
        runner.run(trials, slots, timeout_s)
    if not any(trial.state is not TrialState.FAIL for trial in study.get_trials(deepcopy=False)):
        raise TrainingError(
            f"all {len(result.trials)} trials failed; the first: {result.trials[0]['error']}"
        ) from runner.first_error
    return result


class _Runner:
    """Runs the trials of a study in threads, one for each slot."""

    def __init__(self, study: Study, subject: Subject, space: Space, *, verbose: int) -> None:
        self._result, self._study, self._subject, self._space = study, study.optuna, subject, space
        self._verbose = verbose
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._left = 0
        self._deadline = math.inf
        self.first_error: BaseException | None = None

    def run(self, trials: int, slots: int, timeout_s: float | None) -> None:
        claim(self._study)
        try:
            lost = retake(self._study)
            if lost:
                _log.info("rerunning %d trials of a driver that died.", lost)
            finished = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
            done = self._study.get_trials(deepcopy=False, states=finished)
            self._left = trials - sum(not trial.user_attrs.get(LOST) for trial in done)
            self._deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
            with ThreadPoolExecutor(slots, thread_name_prefix="kindler-tune") as pool:
                threads = [pool.submit(self._work) for _ in range(min(slots, max(self._left, 0)))]
                try:
                    while wait(threads, _LOOK_S).not_done:
                        pass  # a signal that another thread receives does not end a wait
                finally:
                    self._stop.set()  # if interrupted, running trials end at what their workers report next
            for thread in threads:
                thread.result()
        finally:
            release(self._study)

    def _work(self) -> None:
        try:
            while (begun := self._begin()) is not None:
                self._one(*begun)
        except BaseException:
            self._stop.set()
            raise

    def _begin(self) -> tuple[Trial, dict[str, Any]] | None:
        with self._lock:
            if self._stop.is_set() or self._left < 1 or time.monotonic() > self._deadline:
                return None
            self._left -= 1
            return self._space.ask(self._study)

    def _one(self, trial: Trial, values: dict[str, Any]) -> None:
        began = time.monotonic()

        def report(epoch: int, figure: float) -> None:
            trial.report(figure, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned

        def check() -> None:
            if self._stop.is_set():
                raise _Stopped

        try:
            figure, trained, facts = self._subject.run(values, report, check)
            if math.isnan(figure):
                raise TrainingError("the metric is not a number (NaN).")
        except optuna.TrialPruned:
            self._tell(trial, began, "was cut short", state=TrialState.PRUNED)
        except _Stopped:
            with self._lock:
                trial.set_user_attr(LOST, True)
                self._study.tell(trial, state=TrialState.FAIL)
                self._study.enqueue_trial(trial.params)
        except Exception as exc:  # noqa: BLE001 - a trial's own failure does not end the study
            with self._lock:
                self.first_error = self.first_error or exc
            trial.set_user_attr("error", f"{type(exc).__name__}: {exc}")
            _log.warning("trial %d failed: %s: %s", trial.number, type(exc).__name__, exc)
            self._tell(trial, began, f"failed: {type(exc).__name__}", state=TrialState.FAIL)
        else:
            with self._lock:
                trial.set_user_attr("facts", facts)
                self._result._offer(trial.number, figure, trained)
            self._tell(trial, began, f"{self._subject.metric} {figure:.6g}", values=figure)

    def _tell(self, trial: Trial, began: float, said: str, **outcome: Any) -> None:
        seconds = time.monotonic() - began
        with self._lock:
            trial.set_user_attr("seconds", round(seconds, 3))
            self._study.tell(trial, **outcome)
        if self._verbose:
            params = trial.params.items()
            values = ", ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in params)
            sys.stderr.write(f"trial {trial.number} {said} ({values}; {seconds:.1f} s)\n")


def _slots(data: Any) -> int:
    session = getattr(data, "sparkSession", None)
    if session is None:
        return local.slots()
    from kindler.spark.executors import slots

    return slots(session)


def _tpe(seed: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # Trials that run side by side are told apart: what still runs counts as a bad value.
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def _named(option: str, value: Any, known: Mapping[Any, Callable[[], Any]]) -> Any:
    """What a name means, of a sampler or a pruner; anything else is one of Optuna's own."""
    if isinstance(value, str) and value not in known:
        raise ConfigError(f"{option}={value!r}: expected {', '.join(map(repr, known))} or one of Optuna.")
    return known[value]() if isinstance(value, str | None) and value in known else value


def _grid(space: Space) -> list[dict[str, Any]]:
    """The points of the grid, the last parameter changing first."""
    grid: dict[str, list[Any]] = {}
    for name, dimension in space.searched.items():
        distribution: Any = dimension.distribution
        if hasattr(distribution, "choices"):
            grid[name] = list(distribution.choices)
        elif isinstance(distribution, optuna.distributions.IntDistribution) and not distribution.log:
            grid[name] = list(range(distribution.low, distribution.high + 1, distribution.step))
        else:
            raise ConfigError(f"sampler='grid': {name!r} has no list of values; use tune.choice([...]).")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Optuna reports each trial on its own; what is worth saying is said here."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
