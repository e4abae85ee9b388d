"""What goes wrong is told at once, on the driver where it can be known there, and nothing hangs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import models
import problems
import pytest
import watchers
from flavour import FLAVOUR, KERAS, one_is_enough, one_unless_whole

from kindler import Device, Estimator, RunSettings
from kindler.errors import ConfigError, MissingExtraError, WorkerError, WorkerLostError

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

DATA = problems.problem(40)
OPTIONS = {"epochs": 3, "batch_size": 8, "verbose": 0, "feature_cols": "x", "label_cols": "y"}


def two_workers(model: Any, **options: Any) -> Estimator:
    return Estimator.from_keras(model, workers=2, engine="local", **options)


def dense(loss: Any = "mse") -> Any:
    inputs = KERAS.Input((problems.WIDTH,))
    model = KERAS.Model(inputs, KERAS.layers.Dense(1)(inputs))
    if loss is not None:
        model.compile(optimizer="sgd", loss=loss)
    return model


@pytest.mark.parametrize(
    ("where", "kind"),
    [("layer", NotImplementedError), pytest.param("loss", LookupError, marks=one_is_enough)],
)
def test_a_mistake_on_one_rank_arrives_as_that_exception(where: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"a {where}'s own mistake") as caught:
        two_workers(models.failing, config={"where": where}).fit(
            DATA, callbacks=[watchers.Tells()], **OPTIONS
        )

    assert isinstance(caught.value, WorkerError)
    assert caught.value.rank == 1
    assert "models.py" in str(caught.value)


@one_unless_whole
def test_a_killed_worker_is_reported_lost_while_the_other_waits_for_it(tmp_path: Path) -> None:
    with pytest.raises(WorkerLostError, match="SIGKILL") as caught:
        two_workers(
            problems.classifier, config={"flavour": FLAVOUR}, settings=RunSettings(max_failures=0)
        ).fit(DATA, callbacks=[watchers.Falls(tmp_path, "kill")], **OPTIONS)

    assert caught.value.rank == 1


@one_is_enough
def test_a_model_that_is_not_compiled_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not compiled; call model\.compile"):
        two_workers(dense(loss=None)).fit(DATA, **OPTIONS)
    with pytest.raises(ConfigError, match=r"not compiled\.\nHint: its creator must call"):
        two_workers(models.mixed, config={"policy": "float32"}).fit(DATA, **OPTIONS)


@one_is_enough
@pytest.mark.parametrize(
    ("device", "complaint"),
    [
        (
            Device("cpu", precision="bf16"),
            r"Device\(precision='bf16'\) does not apply to Keras models.\nHint: set keras.mixed_precision",
        ),
        (
            Device("cpu", compile="default"),
            r"Device\(compile='default'\) does not apply to Keras models.\nHint: compile_args={'jit_compile'",
        ),
        (Device("cpu", tf32=True, share=True), r"Device\(tf32=True\) does not apply to Keras models.$"),
    ],
)
def test_fields_of_a_device_that_keras_sets_itself_are_refused(device: Device, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        two_workers(dense(), device=device)


@one_is_enough
def test_a_loss_that_is_a_sum_is_refused() -> None:
    est = two_workers(dense(KERAS.losses.MeanSquaredError(reduction="sum")))

    with pytest.raises(ConfigError, match=r"reduction='sum'.*\n?.*Hint: use reduction='sum_over_batch_size'"):
        est.fit(DATA, **OPTIONS)


@one_is_enough
def test_rows_of_another_shape_than_the_model_wants_name_both() -> None:
    wrong = {"x": DATA["x"][:, :4], "y": DATA["y"]}

    with pytest.raises(ConfigError, match=re.escape("shape (4,), and the model's input has (6,)")):
        two_workers(dense()).fit(wrong, **OPTIONS)


def test_a_backend_that_is_not_the_models_is_refused() -> None:
    other = "jax" if FLAVOUR != "jax" else "torch"

    with pytest.raises(
        ConfigError, match=f"keras_backend='{other}', but this model was created with Keras on"
    ):
        two_workers(dense(), keras_backend=other)
    with pytest.raises(ConfigError, match="must be one of tensorflow, jax, torch"):
        two_workers(models.words, keras_backend="theano")


@one_is_enough
def test_a_backend_that_is_not_installed_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jax" else found(name))

    with pytest.raises(MissingExtraError, match=r"pip install 'kindler\[jax\]'"):
        two_workers(models.words, keras_backend="jax")


@one_is_enough
def test_what_is_no_model_is_told_from_one() -> None:
    with pytest.raises(ConfigError, match=r"model must be a Keras model or a function .* received 3 of type"):
        two_workers(3)
    with pytest.raises(ConfigError, match="compile_args must be a dict or a function .* received 'adam'"):
        two_workers(dense, compile_args="adam")
    with pytest.raises(ConfigError, match=r"must return a Keras model; it returned 3"):
        two_workers(lambda: 3).fit(DATA, **OPTIONS)


@one_is_enough
def test_a_model_with_one_input_gets_no_several_columns() -> None:
    rows = {"height": DATA["x"][:, 0], "width": DATA["x"][:, 1], "y": DATA["y"]}

    with pytest.raises(ConfigError, match=r"one input, but there are 2 .*'width'.*\n.*stack_features"):
        Estimator.from_keras(model=dense(), workers=1, engine="local").fit(
            rows, **{**OPTIONS, "feature_cols": ["height", "width"]}
        )
