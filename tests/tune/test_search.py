"""Searches on the local engine: what is chosen, cut short, survived and gone on with."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from torch import nn

from kindler import Estimator
from kindler.errors import ConfigError, NotFittedError, TrainingError
from kindler.tune import Study, choice, loguniform, search, uniform
from tests.conftest import eventually_none, workers

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
ROWS = {"x": X, "y": X.sum(1, keepdims=True)}
FIT = {"epochs": 2, "batch_size": 32, "feature_cols": "x", "label_cols": "y"}

pytestmark = pytest.mark.usefixtures("no_workers_left")


def linear(values: dict[str, Any]) -> Estimator:
    if values.get("lr") == "broken":
        raise ValueError("no such rate")
    model = nn.Linear(3, 1)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=values["lr"])
    return Estimator.from_torch(model=model, optimizer=optimizer, loss=nn.MSELoss(), workers=1)


@pytest.fixture(scope="module")
def study() -> Study:
    """Four rates side by side on two slots; one of them cannot be, and one blows up."""
    rates = choice([1e-6, "broken", 0.1, 1e30])
    return search(
        linear, {"lr": rates}, ROWS, ROWS, trials=4, slots=2, sampler="grid", pruner=None, fit=FIT, verbose=0
    )


def test_the_best_values_and_their_trained_estimator_are_found(study: Study) -> None:
    expected = np.mean((study.best_estimator.predict({"x": X}, verbose=0)["prediction"] - ROWS["y"]) ** 2)

    assert study.best_params == {"lr": 0.1}
    assert study.best_value == pytest.approx(expected, rel=1e-5)
    assert study.best_trial["epochs"] == 2
    assert len(study.best_estimator.history) == 2


def test_a_trial_that_fails_is_a_row_of_the_table_and_the_others_go_on(study: Study) -> None:
    states = {str(row["params"]["lr"]): (row["state"], row["error"]) for row in study.trials}

    assert states["broken"] == ("failed", "ValueError: no such rate")
    assert states["1e+30"][0] == "failed"
    assert states["1e+30"][1].startswith("NonFiniteLossError: the loss is ")
    assert states["0.1"] == states["1e-06"] == ("finished", None)
    assert list(study.table()["lr"]) == [row["params"]["lr"] for row in study.trials]
    assert "params" not in study.table()
    assert "2 finished" in repr(study)
    assert "2 failed" in repr(study)


def test_a_study_is_drawn(study: Study, tmp_path: Path) -> None:
    figure = study.plot(tmp_path / "study.png")

    assert [axes.get_title() for axes in figure.axes] == ["trials", "epochs", "lr"]
    assert {axes.get_ylabel() for axes in figure.axes} == {"val_loss"}
    assert (tmp_path / "study.png").stat().st_size > 0


class CutAllButTheFirst(optuna.pruners.BasePruner):
    def prune(self, study: Any, trial: Any) -> bool:
        return bool(trial.number > 0)


def test_a_trial_that_is_cut_short_ends_at_once_and_frees_its_slot() -> None:
    forever = {**FIT, "epochs": 100_000}  # but for the pruner, the second trial would never end
    first = [True]

    def once(values: dict[str, Any]) -> Estimator:
        est = linear(values)
        if first:
            first.clear()
            original = est.fit
            est.fit = lambda *a, **k: original(*a, **{**k, "epochs": 1})  # type: ignore[method-assign, misc]
        return est

    found = search(
        once,
        {"lr": uniform(0.01, 0.1)},
        ROWS,
        trials=3,
        slots=1,
        pruner=CutAllButTheFirst(),
        fit=forever,
        verbose=0,
    )

    assert [row["state"] for row in found.trials] == ["finished", "cut short", "cut short"]
    assert [row["epochs"] for row in found.trials] == [1, 1, 1]


def test_slots_run_side_by_side() -> None:
    together = threading.Barrier(2, timeout=60)

    def meet(values: dict[str, Any]) -> Estimator:
        together.wait()
        return linear(values)

    found = search(meet, {"lr": uniform(0.01, 0.1)}, ROWS, trials=2, slots=2, fit=FIT, verbose=0)
    assert [row["state"] for row in found.trials] == ["finished"] * 2


def test_an_estimator_is_searched_by_its_config_its_rate_and_options_of_fit() -> None:
    def model(config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(3, config["hidden"]), nn.Linear(config["hidden"], 1))

    est = Estimator.from_torch(
        model=model, optimizer=torch.optim.SGD, loss=nn.MSELoss(), config={"hidden": 1}, seed=3
    )
    found = search(
        est,
        {"hidden": choice([5]), "learning_rate": choice([0.05])},
        ROWS,
        trials=1,
        fit={**FIT, "batch_size": choice([64])},
        verbose=0,
    )

    assert found.best_params == {"hidden": 5, "learning_rate": 0.05, "fit.batch_size": 64}
    assert found.best_estimator.get_model()[0].weight.shape == (5, 3)
    assert [row["steps"] for row in found.best_estimator.history] == [1, 1]
    assert len(est.history) == 0


PROGRAM = """
import os, sys
import numpy as np
sys.path.insert(0, {here!r})
from test_search import FIT, ROWS, linear
from kindler.tune import choice, search

def dies(values):
    if values["lr"] == 0.03:
        os._exit(7)
    return linear(values)

search(dies, {{"lr": choice([0.1, 0.03, 1e-4])}}, ROWS, trials=3, slots=1, sampler="grid", fit=FIT,
       folder=sys.argv[1], pruner=None, verbose=0, seed=4)
"""


def test_a_study_goes_on_after_its_driver_died(tmp_path: Path) -> None:
    program = PROGRAM.format(here=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, timeout=200)
    assert done.returncode == 7, done.stderr[-2000:]
    seen: list[float] = []

    def counted(values: dict[str, Any]) -> Estimator:
        seen.append(values["lr"])
        return linear(values)

    rates = choice([0.1, 0.03, 1e-4])
    found = search(
        counted,
        {"lr": rates},
        ROWS,
        trials=3,
        slots=1,
        sampler="grid",
        fit=FIT,
        folder=tmp_path,
        pruner=None,
        verbose=0,
    )

    before = [row for row in found.trials if row["state"] == "finished" and row["params"]["lr"] not in seen]
    assert sorted([*seen, *(row["params"]["lr"] for row in before)]) == [1e-4, 0.03, 0.1]
    assert 0.03 in seen
    assert [row["state"] for row in found.trials].count("lost") == 1
    assert found.best_params == {"lr": 0.1}
    predicted = found.best_estimator.predict({"x": X}, verbose=0)["prediction"]
    assert np.mean((predicted - ROWS["y"]) ** 2) < found.trials[-1]["value"] * 10
    again = search(
        counted,
        {"lr": rates},
        ROWS,
        trials=3,
        slots=1,
        sampler="grid",
        fit=FIT,
        folder=tmp_path,
        pruner=None,
        verbose=0,
    )
    assert len(again.trials) == len(found.trials)
    np.testing.assert_array_equal(again.best_estimator.predict({"x": X}, verbose=0)["prediction"], predicted)
    assert len(list(tmp_path.glob("trial-*"))) == 1


def test_what_cannot_work_is_refused_before_anything_runs(tmp_path: Path) -> None:
    def never(values: dict[str, Any]) -> Estimator:
        raise AssertionError

    with pytest.raises(ConfigError, match="nothing to search"):
        search(never, {"lr": 0.1}, ROWS)
    with pytest.raises(ConfigError, match="trials must be"):
        search(never, {"lr": uniform(0, 1)}, ROWS, trials=0)
    with pytest.raises(ConfigError, match="sampler='tpee'"):
        search(never, {"lr": uniform(0, 1)}, ROWS, sampler="tpee")
    with pytest.raises(ConfigError, match="pruner='none'"):
        search(never, {"lr": uniform(0, 1)}, ROWS, pruner="none")
    with pytest.raises(ConfigError, match="has no list of values"):
        search(never, {"lr": uniform(0, 1)}, ROWS, sampler="grid")
    with pytest.raises(ConfigError, match="expected sqlite"):
        search(never, {"lr": uniform(0, 1)}, ROWS, storage="mysql://host/db")
    with pytest.raises(ConfigError, match="is empty"):
        uniform(1, 0)
    with pytest.raises(ConfigError, match="begin above 0"):
        loguniform(0, 1)
    with pytest.raises(ConfigError, match="not a dimension"):
        search(never, {"lr": range(3)}, ROWS)
    with pytest.raises(ConfigError, match="evaluator= is for stages"):
        search(never, {"lr": uniform(0, 1)}, ROWS, evaluator=object())


def test_a_study_of_failures_alone_raises_the_first() -> None:
    with pytest.raises(
        TrainingError, match="all 2 trials failed; the first: ValueError: no such rate"
    ) as caught:
        search(linear, {"lr": choice(["broken"])}, ROWS, trials=2, fit=FIT, verbose=0)
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_interrupt_ends_running_trials_at_once_and_they_run_again_later(tmp_path: Path) -> None:
    options: dict[str, Any] = {"slots": 1, "folder": tmp_path, "pruner": None, "verbose": 0}
    endless = {**FIT, "epochs": 1_000_000, "batch_size": 1}

    def interrupting(values: dict[str, Any]) -> Estimator:
        threading.Timer(1.0, _thread.interrupt_main).start()
        return linear(values)

    with pytest.raises(KeyboardInterrupt):
        search(interrupting, {"lr": choice([0.01])}, ROWS, trials=1, fit=endless, **options)
    assert not eventually_none(workers)
    found = search(linear, {"lr": choice([0.01])}, ROWS, trials=1, fit=FIT, **options)
    assert [row["state"] for row in found.trials] == ["lost", "finished"]
    with pytest.raises(ConfigError, match="was created with direction='minimize'"):
        search(linear, {"lr": choice([0.01])}, ROWS, metric="max:loss", trials=1, fit=FIT, **options)


def test_a_study_without_a_folder_does_not_keep_what_another_process_trained(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "storage": f"sqlite:///{tmp_path / 'x.db'}",
        "trials": 1,
        "fit": FIT,
        "verbose": 0,
    }
    search(linear, {"lr": choice([0.1])}, ROWS, **options)
    again = search(linear, {"lr": choice([0.1])}, ROWS, **options)

    with pytest.raises(NotFittedError, match="was not kept"):
        _ = again.best_estimator
