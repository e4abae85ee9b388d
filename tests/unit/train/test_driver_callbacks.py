"""Driver callbacks: each epoch ends once, and every run that began has an end."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kindler.train.callbacks import DriverCallback, DriverCallbackList, RunStatus, run_params, split_callbacks
from kindler.train.options import FitOptions


class Notes(DriverCallback):
    def __init__(self) -> None:
        self.said: list[Any] = []

    def on_run_begin(self, params: Mapping[str, Any]) -> None:
        self.said.append(dict(params))

    def on_workers_ready(self, workers: int) -> None:
        self.said.append(workers)

    def on_epoch_end(self, logs: Mapping[str, Any]) -> None:
        self.said.append(f"epoch {logs['epoch']}")

    def on_run_end(self, status: RunStatus, error: BaseException | None, estimator: Any) -> None:
        self.said.append((status, estimator))


def epoch(number: int) -> dict[str, Any]:
    return {"name": "epoch", "row": {"epoch": number}}


def test_driver_callbacks_are_taken_out_of_the_callbacks() -> None:
    notes = Notes()

    assert split_callbacks([1, notes, 2]) == ([notes], [1, 2])
    assert split_callbacks(None) == ([], [])


def test_an_epoch_that_is_trained_or_reported_again_ends_once() -> None:
    notes = Notes()

    with DriverCallbackList([notes]).running("estimator", {"seed": 1}) as callbacks:
        for fields in ({"name": "gang", "workers": 2}, epoch(1), epoch(2), {"name": "gang", "workers": 1}):
            callbacks.report(fields)
        for fields in ({"name": "progress"}, epoch(1), epoch(2), epoch(3)):
            callbacks.report(fields)
        callbacks.finish([{"epoch": number} for number in range(1, 5)])

    assert notes.said == [
        {"seed": 1}, 2, "epoch 1", "epoch 2", 1, "epoch 3", "epoch 4", ("finished", "estimator")
    ]  # fmt: skip


@pytest.mark.parametrize(("error", "status"), [(ValueError, "failed"), (KeyboardInterrupt, "killed")])
def test_a_run_that_began_has_an_end_whatever_happens(error: type[BaseException], status: str) -> None:
    notes = Notes()

    with pytest.raises(error), DriverCallbackList([notes]).running(None, {}):
        raise error

    assert notes.said[-1] == (status, None)


def test_an_error_at_the_begin_ends_the_callbacks_that_had_begun() -> None:
    class Refuses(Notes):
        def on_run_begin(self, params: Mapping[str, Any]) -> None:
            raise ConnectionError

    before, refusing, after = Notes(), Refuses(), Notes()

    with pytest.raises(ConnectionError), DriverCallbackList([before, refusing, after]).running(None, {}):
        pass

    assert before.said == [{}, ("failed", None)]
    assert refusing.said == after.said == []


class Optimizer:
    def __init__(self, lr: float) -> None:
        self.defaults = {"lr": lr, "foreach": None}


def spec(optimizer: Any) -> SimpleNamespace:
    config = {"width": 8, "layers": [1, 2]}
    return SimpleNamespace(model=dict, optimizer=optimizer, loss=None, config=config, clip_norm=1.0)


def test_parameters_of_a_run_are_names_and_plain_values() -> None:
    assert run_params(spec(Optimizer(0.1)), FitOptions(batch_size=4), workers=None, seed=3) == {
        "model": "dict",
        "optimizer": "Optimizer",
        "optimizer.lr": 0.1,
        "config.width": 8,
        "clip_norm": 1.0,
        "batch_size": 4,
        "shuffle": True,
        "seed": 3,
    }


def test_a_partial_is_known_by_what_it_calls_and_its_arguments() -> None:
    facts = run_params(spec(partial(Optimizer, lr=0.5)), FitOptions())

    assert (facts["optimizer"], facts["optimizer.lr"]) == ("Optimizer", 0.5)
