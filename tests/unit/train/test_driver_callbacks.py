"""Who follows a run from the driver: told of each epoch once, and of the end however it comes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kindler.train.driver_callbacks import Ending, Watch, Watcher, divided
from kindler.train.options import FitOptions
from kindler.train.run_params import run_params


class Notes(Watcher):
    def __init__(self) -> None:
        self.said: list[Any] = []

    def run_begins(self, facts: Mapping[str, Any]) -> None:
        self.said.append(dict(facts))

    def workers_join(self, workers: int) -> None:
        self.said.append(workers)

    def epoch_ends(self, row: Mapping[str, Any]) -> None:
        self.said.append(f"epoch {row['epoch']}")

    def run_ends(self, ending: Ending, error: BaseException | None, estimator: Any) -> None:
        self.said.append((ending, estimator))


def epoch(number: int) -> dict[str, Any]:
    return {"name": "epoch", "row": {"epoch": number}}


def test_watchers_are_found_among_the_callbacks() -> None:
    notes = Notes()

    assert divided([1, notes, 2]) == ([notes], [1, 2])
    assert divided(None) == ([], [])


def test_an_epoch_that_is_trained_again_or_told_again_at_the_end_is_told_once() -> None:
    notes = Notes()

    with Watch([notes]).over("estimator", {"seed": 1}) as watch:
        for fields in ({"name": "gang", "workers": 2}, epoch(1), epoch(2), {"name": "gang", "workers": 1}):
            watch.report(fields)
        for fields in ({"name": "progress"}, epoch(1), epoch(2), epoch(3)):
            watch.report(fields)
        watch.finish([{"epoch": number} for number in range(1, 5)])

    assert notes.said == [
        {"seed": 1}, 2, "epoch 1", "epoch 2", 1, "epoch 3", "epoch 4", ("finished", "estimator")
    ]  # fmt: skip


@pytest.mark.parametrize(("error", "ending"), [(ValueError, "failed"), (KeyboardInterrupt, "killed")])
def test_what_began_is_told_of_the_end_however_it_comes(error: type[BaseException], ending: str) -> None:
    notes = Notes()

    with pytest.raises(error), Watch([notes]).over(None, {}):
        raise error

    assert notes.said[-1] == (ending, None)


def test_one_that_refuses_to_begin_ends_those_before_it_and_is_not_told_itself() -> None:
    class Refuses(Notes):
        def run_begins(self, facts: Mapping[str, Any]) -> None:
            raise ConnectionError

    before, refusing, after = Notes(), Refuses(), Notes()

    with pytest.raises(ConnectionError), Watch([before, refusing, after]).over(None, {}):
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
