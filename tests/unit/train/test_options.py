"""Options are checked once, know what they add up to, and say the same as the calls that build them."""

from __future__ import annotations

import inspect
import pickle
import re
from dataclasses import fields
from typing import Any

import pytest

import kindler
from kindler import Checkpoints, Estimator, RunSettings
from kindler.data.column_options import ColumnOptions
from kindler.estimator.groups import GROUPS
from kindler.train.options import EvaluateOptions, FitOptions, PredictOptions, RunOptions
from kindler.train.triggers import Progress

CALLS = [
    (Estimator.fit, FitOptions),
    (Estimator.evaluate, EvaluateOptions),
    (Estimator.predict, PredictOptions),
]
CONSTRUCTORS = [Estimator.from_torch, Estimator.from_keras, Estimator.from_lightning]


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


def defaults(call: Any) -> dict[str, Any]:
    """Of the arguments of a call, and of the fields of the groups that it takes."""
    own = {name: argument.default for name, argument in inspect.signature(call).parameters.items()}
    kinds = [RunSettings, *(kind for name, kind in GROUPS.items() if name in own)]
    return {field.name: field.default for kind in kinds for field in fields(kind)} | own


@pytest.mark.parametrize(("call", "options"), CALLS, ids=["fit", "evaluate", "predict"])
def test_every_option_is_an_argument_or_a_field_with_the_same_default(
    call: Any, options: type[RunOptions]
) -> None:
    given = defaults(call)

    for field in fields(options):
        # The call takes some apart; finishing outputs is for subclasses alone, and what is done to rows
        # is the estimator's.
        if field.name not in ("columns", "callbacks", "strategy", "finish", "types", "preparation"):
            assert given[field.name] == field.default, field.name


@pytest.mark.parametrize(
    "call",
    [
        Estimator.fit,
        Estimator.evaluate,
        Estimator.predict,
        Estimator.register_udf,
        *CONSTRUCTORS,
        Estimator.from_framework,
    ],
    ids=lambda call: call.__name__,
)
def test_help_documents_every_argument(call: Any) -> None:
    assert inspect.signature(call).parameters.keys() - {"self"} <= documented(call).keys()


@pytest.mark.parametrize("group", [*GROUPS.values(), RunSettings], ids=lambda group: group.__name__)
def test_help_documents_every_field_of_a_group(group: Any) -> None:
    assert [field.name for field in fields(group)] == [*documented(group)]


@pytest.mark.parametrize(
    ("call", "most"),
    [*((call, 16) for call in (*CONSTRUCTORS, Estimator.fit)), (Estimator.predict, 13)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_signature_can_be_read_at_a_glance(call: Any, most: int) -> None:
    assert len(inspect.signature(call).parameters) <= most


def test_a_field_is_in_one_group_and_is_no_argument_beside_it() -> None:
    names = [field.name for kind in GROUPS.values() for field in fields(kind)]
    arguments = {
        name for call in (*CONSTRUCTORS, Estimator.fit) for name in inspect.signature(call).parameters
    }

    assert len(names) == len({*names})
    assert arguments & {*names} == {"epochs"}  # the number, or the group


@pytest.mark.parametrize(
    "call",
    [Estimator.fit, Estimator.evaluate, Estimator.predict, *CONSTRUCTORS],
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


def test_an_argument_that_nothing_has_is_answered_with_the_nearest_one_or_field() -> None:
    with pytest.raises(TypeError, match=r"Estimator.from_torch\(\) got .* 'worker'. Did you mean 'workers'"):
        Estimator.from_torch(model=None, worker=2)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"Estimator.fit\(\) got .* 'steps_an_epoch'. Did you mean 'steps_per_epoch'"
    ):
        Estimator.fit(None, steps_an_epoch=2)  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize(
    ("call", "name", "hint"),
    [
        (Estimator.fit, "steps_per_epoch", "pass epochs=Epochs(steps_per_epoch=...)."),
        (Estimator.fit, "end_trigger", "pass epochs=Epochs(stop_when=...)."),
        (Estimator.fit, "shapes", "pass columns=Columns(shapes=...)."),
        (Estimator.fit, "sample_weight_col", "pass columns=Columns(weight_col=...)."),
        (Estimator.fit, "model_dir", "pass checkpoint=Checkpoints(folder=...)."),
        (Estimator.fit, "keep_checkpoints", "pass checkpoint=Checkpoints(keep=...)."),
        (Estimator.fit, "log_dir", "pass callbacks=[kindler.callbacks.TensorBoard(...)] of fit."),
        (Estimator.fit, "nan_loss", "pass settings=RunSettings(nan_loss=...) of the constructor."),
        (Estimator.fit, "clip_norm", "pass optimization=Optimization(clip_norm=...) to the constructor."),
        (Estimator.evaluate, "dtypes", "pass columns=Columns(dtypes=...)."),
        (Estimator.predict, "checkpoint_trigger", "pass checkpoint=Checkpoints(every=...) to fit."),
        (Estimator.register_udf, "shapes", "pass columns=Columns(shapes=...)."),
        (Estimator.from_torch, "clip_norm", "pass optimization=Optimization(clip_norm=...)."),
        (Estimator.from_torch, "share_gpus", "pass device=Device(share=...)."),
        (Estimator.from_torch, "transform", "pass prepare=Prepare(transform=...)."),
        (Estimator.from_torch, "model_dir", "pass checkpoint=Checkpoints(folder=...) to fit."),
        (Estimator.from_keras, "precision", "pass device=Device(precision=...)."),
        (Estimator.from_lightning, "log_dir", "pass callbacks=[kindler.callbacks.TensorBoard(...)] of fit."),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_argument_that_is_elsewhere_is_rejected_with_its_place(call: Any, name: str, hint: str) -> None:
    message = (
        rf"{call.__qualname__}\(\) got an unexpected keyword argument '{name}'\.\nHint: {re.escape(hint)}$"
    )
    with pytest.raises(TypeError, match=message):
        call(None, **{name: 1})


def third_epoch(progress: Progress) -> bool:
    return progress.epoch > 3


def test_options_travel_and_stay_equal() -> None:
    options = FitOptions(epochs=2, stop_when=third_epoch, columns=ColumnOptions(feature_cols=["a"]))

    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("options", "epochs", "endless"),
    [
        ({}, 1, False),
        ({"epochs": 5}, 5, False),
        ({"epochs": 5, "initial_epoch": 2}, 3, False),
        ({"epochs": 5, "max_steps": 9}, 5, False),
        ({"max_steps": 9}, 2**31, True),
        ({"stop_when": third_epoch}, 2**31, True),
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
    fit = FitOptions(checkpoint=Checkpoints("folder", every=trigger))
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
        ({"checkpoint": Checkpoints("folder", keep=1.5)}, "keep must be"),  # type: ignore[arg-type]
        ({"ingest": "fast"}, "ingest must be 'auto', 'inline' or 'direct'; received 'fast'"),
        ({"epochs": 3, "initial_epoch": 3}, "initial_epoch=3 must be less than epochs=3"),
        ({"validation_freq": (0,)}, "validation_freq must be at least 1"),
        ({"stop_when": Estimator}, "stop_when must be a function of `Progress`"),
        ({"stop_when": 5}, "stop_when must be a function of `Progress`"),
        ({"checkpoint": Checkpoints("folder", every=0)}, "every must be a whole number of at least 1"),
        ({"checkpoint": Checkpoints("folder", every=True)}, "every must be a whole number of at least 1"),
        ({"checkpoint": Checkpoints("folder", best="val_gain")}, "Checkpoints(best=...): "),
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
