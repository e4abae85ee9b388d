"""Options are checked once, know what they add up to, and say the same as the calls that build them."""

from __future__ import annotations

import inspect
import pickle
import re
from dataclasses import MISSING, fields
from typing import Any

import pytest

import kindler
from kindler import Estimator
from kindler.data.column_options import ColumnOptions
from kindler.train.options import EvaluateOptions, FitOptions, PredictOptions, RunOptions
from kindler.train.triggers import Progress

CALLS = [
    (Estimator.fit, FitOptions),
    (Estimator.evaluate, EvaluateOptions),
    (Estimator.predict, PredictOptions),
]


def documented(thing: Any) -> dict[str, str]:
    """The entries of a docstring's Args or Attributes."""
    entries: dict[str, str] = {}
    name, depth = "", 0
    for line in (inspect.getdoc(thing) or "").split("\n"):
        started = re.match(r"(    )(\w+): (.*)", line)
        if started:
            name, depth = started[2], 8
            entries[name] = started[3]
        elif name and line.startswith(" " * depth):
            entries[name] += " " + line.strip()
        else:
            name = ""
    return entries


def default(field: Any) -> Any:
    return None if field.default is MISSING else field.default


@pytest.mark.parametrize(("call", "options"), CALLS, ids=["fit", "evaluate", "predict"])
def test_every_option_is_a_keyword_with_the_same_default(call: Any, options: type[RunOptions]) -> None:
    keywords = inspect.signature(call).parameters

    for field in fields(options):
        # The call takes some apart; finishing outputs is for subclasses alone, and what is done to rows
        # is the estimator's.
        if field.name not in ("columns", "callbacks", "strategy", "finish", "preparation"):
            assert keywords[field.name].default == default(field), field.name


@pytest.mark.parametrize(
    "call",
    [
        Estimator.fit,
        Estimator.evaluate,
        Estimator.predict,
        Estimator.from_torch,
        Estimator.from_keras,
        Estimator.from_lightning,
        Estimator.from_framework,
    ],
    ids=lambda call: call.__name__,
)
def test_help_documents_every_argument(call: Any) -> None:
    assert inspect.signature(call).parameters.keys() - {"self"} <= documented(call).keys()


@pytest.mark.parametrize(
    "call",
    [Estimator.fit, Estimator.evaluate, Estimator.predict, Estimator.from_torch, Estimator.from_keras],
    ids=lambda call: call.__name__,
)
def test_models_data_and_what_trains_have_types(call: Any) -> None:
    parameters = inspect.signature(call).parameters
    typed = ("model", "data", "validation_data", "optimizer", "loss", "metrics", "scheduler", "callbacks")
    types = {name: parameters[name].annotation for name in typed if name in parameters}

    assert types
    assert [name for name, annotation in types.items() if "Any" in annotation] == []
    names = {word for annotation in types.values() for word in re.findall(r"\w+", annotation)}
    assert names - {"None"} <= set(kindler.types.__all__)


def test_an_argument_that_a_constructor_does_not_have_is_rejected_by_name() -> None:
    with pytest.raises(TypeError, match=r"Estimator.from_torch\(\) got .* 'worker'. Did you mean 'workers'"):
        Estimator.from_torch(model=None, worker=2)  # type: ignore[call-arg]


def third_epoch(progress: Progress) -> bool:
    return progress.epoch > 3


def test_options_travel_and_stay_equal() -> None:
    options = FitOptions(epochs=2, end_trigger=third_epoch, columns=ColumnOptions(feature_cols=["a"]))

    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("options", "epochs", "endless"),
    [
        ({}, 1, False),
        ({"epochs": 5}, 5, False),
        ({"epochs": 5, "initial_epoch": 2}, 3, False),
        ({"epochs": 5, "max_steps": 9}, 5, False),
        ({"max_steps": 9}, 2**31, True),
        ({"end_trigger": third_epoch}, 2**31, True),
    ],
    ids=str,
)
def test_without_a_number_of_epochs_steps_or_a_trigger_end_the_run(
    options: dict[str, Any], epochs: int, endless: bool
) -> None:
    fit = FitOptions(**options)

    assert (fit.epochs_to_train, fit.endless) == (epochs, endless)


@pytest.mark.parametrize(
    ("trigger", "steps"),
    [(None, [4, 8]), (3, [3, 4, 6, 8]), (4, [4, 8]), (lambda progress: progress.step == 5, [5])],
    ids=["none", "3 steps", "4 steps", "a function"],
)
def test_a_checkpoint_is_written_after_so_many_steps_and_every_epoch_or_when_the_function_says_so(
    trigger: Any, steps: list[int]
) -> None:
    fit = FitOptions(checkpoint_trigger=trigger)
    moments = [Progress(epoch=1 + step // 5, step=step, epoch_ended=step % 4 == 0) for step in range(1, 9)]

    assert [moment.step for moment in moments if fit.writes_checkpoint(moment)] == steps


@pytest.mark.parametrize(("freq", "epochs"), [(1, [1, 2, 3, 4]), (2, [2, 4]), ((1, 4), [1, 4])])
def test_validation_comes_every_so_many_epochs_or_after_those_named(freq: Any, epochs: list[int]) -> None:
    fit = FitOptions(validation_freq=freq)

    assert [epoch for epoch in range(1, 5) if fit.validates(epoch)] == epochs


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1; received 0"),
        ({"epochs": True}, "epochs must be a whole number"),
        ({"keep_checkpoints": 1.5}, "keep_checkpoints must be"),
        ({"ingest": "fast"}, "ingest must be 'auto', 'inline' or 'direct'; received 'fast'"),
        ({"epochs": 3, "initial_epoch": 3}, "initial_epoch=3 must be less than epochs=3"),
        ({"validation_freq": (0,)}, "validation_freq must be at least 1"),
        ({"end_trigger": Estimator}, "end_trigger must be a function of `Progress`"),
        ({"end_trigger": 5}, "end_trigger must be a function of `Progress`"),
        ({"checkpoint_trigger": 0}, "checkpoint_trigger must be a whole number of at least 1"),
        ({"checkpoint_trigger": True}, "checkpoint_trigger must be a whole number of at least 1"),
        ({"best_metric": "val_gain"}, "best_metric: "),
    ],
    ids=str,
)
def test_what_cannot_work_is_said(options: dict[str, Any], complaint: str) -> None:
    (said,) = FitOptions(**options).complaints()

    assert complaint in said


def test_everything_that_is_wrong_is_said_at_once() -> None:
    assert len(list(FitOptions(batch_size=0, epochs=0, ingest="fast").complaints())) == 3  # type: ignore[arg-type]


def test_what_evaluate_leaves_open_is_as_the_last_fit_had_it() -> None:
    last = ColumnOptions(feature_cols="a", label_cols="t", stack_features=True, allow_nan=["a"])

    assert ColumnOptions(feature_cols="b", allow_nan=False).or_else(last) == ColumnOptions(
        feature_cols="b", label_cols="t", stack_features=True, allow_nan=False
    )


def test_columns_of_the_last_fit_that_are_not_there_are_left_out() -> None:
    last = ColumnOptions(
        feature_cols=["a", "b"],
        label_cols="y",
        shapes={"a": 2, "y": 1},
        dtypes={"b": "int8"},
        allow_nan=["b", "y"],
    )

    assert last.within(["x", "y"]) == ColumnOptions(
        feature_cols=None, label_cols="y", shapes={"y": 1}, dtypes={}, allow_nan=["y"]
    )
