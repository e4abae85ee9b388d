"""Workers train with the optimizer that the model has now, whatever was saved, swapped or compiled before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import problems
import pytest
from flavour import FLAVOUR, KERAS, keras2_unless_whole, one_is_enough, one_unless_whole, two_unless_whole

from kindler import Estimator
from tests.whole import WHOLE

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

DATA = problems.problem(24)
X, Y = DATA["x"], DATA["y"].astype(np.float32).reshape(-1, 1)
ONE_STEP = {"epochs": 1, "batch_size": 24, "verbose": 0, "shuffle": False}


class Halved(KERAS.optimizers.SGD):
    """An optimizer of the user's own."""

    def __init__(self, learning_rate: Any = 0.1, half: float = 0.5, **options: Any) -> None:
        super().__init__(learning_rate, **options)
        self.half = half

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "half": self.half}


def falling() -> Any:
    return KERAS.optimizers.Adam(KERAS.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))


def scaled() -> Any:
    where = KERAS.mixed_precision if FLAVOUR == "tf_keras" else KERAS.optimizers
    return where.LossScaleOptimizer(KERAS.optimizers.Adam(0.1))


def state(optimizer: Any) -> list[np.ndarray]:
    variables = optimizer.variables
    return [np.array(one.numpy()) for one in (variables() if callable(variables) else variables)]


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: KERAS.optimizers.Adam(0.1),
    "own": lambda: Halved(0.2, momentum=0.9),
    "schedule": falling,
    "loss_scale": scaled,
}


def each(*names: str) -> pytest.MarkDecorator:
    """Every kind of file with Adam, and every optimizer with the first kind; all pairs of them on request."""
    pairs = [
        pytest.param(
            optimizer,
            name,
            marks=one_is_enough if optimizer in ("schedule", "own") or name == "m.keras" else (),
        )
        for optimizer in OPTIMIZERS
        for name in names
        if WHOLE or optimizer == "adam" or name == names[0]
    ]
    return pytest.mark.parametrize(("optimizer", "name"), pairs)


def compiled(optimizer: str = "adam") -> Any:
    KERAS.utils.set_random_seed(3)
    layers = [KERAS.Input((problems.WIDTH,)), KERAS.layers.Dense(3, activation="tanh"), KERAS.layers.Dense(1)]
    model = KERAS.Sequential(layers)
    model.compile(optimizer=OPTIMIZERS[optimizer](), loss="mse")
    return model


def steps(model: Any, count: int) -> Any:
    for _ in range(count):
        model.train_on_batch(X, Y)
    return model


def estimator(model: Any, workers: int = 1) -> Estimator:
    return Estimator.from_keras(model, workers=workers, engine="local")


def difference(one: Any, other: Any) -> float:
    return problems.largest_difference(one.get_weights(), other.get_weights())


def quietly_saved(model: Any, path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save(str(path))
    return model


@keras2_unless_whole
@each("m.h5", "m.keras")
def test_a_model_that_was_saved_trains_on_with_its_own_optimizer(
    optimizer: str, name: str, tmp_path: Path
) -> None:
    model = quietly_saved(steps(compiled(optimizer), 2), tmp_path / name)

    estimator(model, workers=2).fit((X, Y), **ONE_STEP)

    assert difference(model, steps(compiled(optimizer), 3)) < 1e-5


@one_unless_whole
def test_a_model_trains_with_an_optimizer_that_was_assigned_to_it() -> None:
    model, alone = compiled("own"), compiled("own")
    for each in (model, alone):
        each.optimizer = KERAS.optimizers.SGD(0.3, momentum=0.5)

    estimator(model).fit((X, Y), **ONE_STEP)

    assert difference(model, steps(alone, 1)) < 1e-6


@two_unless_whole
def test_a_model_that_is_compiled_anew_between_fits_trains_with_its_new_optimizer() -> None:
    def second_compile(model: Any) -> None:
        model.layers[0].trainable = False
        model.compile(optimizer=KERAS.optimizers.SGD(0.2, momentum=0.9), loss="mse")

    model, alone = compiled("adam"), compiled("adam")
    est = estimator(model, workers=2)
    est.fit((X, Y), **ONE_STEP)
    second_compile(model)
    est.fit((X, Y), **{**ONE_STEP, "epochs": 2})

    steps(alone, 1)
    second_compile(alone)
    assert difference(model, steps(alone, 2)) < 1e-5


@one_is_enough
def test_weights_given_to_the_model_between_fits_are_trained_on_and_scored_with() -> None:
    model, alone = compiled("own"), compiled("own")
    est = estimator(model)
    est.fit((X, Y), **ONE_STEP)
    steps(alone, 1)
    for each in (model, alone):
        each.set_weights([weight * 2 for weight in each.get_weights()])

    assert est.predict(X) == pytest.approx(alone.predict(X, verbose=0), abs=1e-6)
    est.fit((X, Y), **ONE_STEP)

    assert difference(model, steps(alone, 1)) < 1e-6


@each("m.h5", "m.weights.h5", "m.keras")
def test_a_file_gives_the_optimizers_state_back(optimizer: str, name: str, tmp_path: Path) -> None:
    model = steps(compiled(optimizer), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        estimator(model).save(tmp_path / name)

    again = estimator(compiled(optimizer)).load_weights(tmp_path / name)

    steps(again.get_model(), 2)
    assert difference(again.get_model(), steps(model, 2)) < 1e-6


@one_is_enough
def test_saving_as_h5_leaves_the_models_own_record_as_it_was(tmp_path: Path) -> None:
    model = compiled()
    before = model.get_compile_config()

    with pytest.warns(UserWarning, match=r"m\.h5: from \.h5 files Keras 3 itself reads no optimizer state"):
        estimator(model).save(tmp_path / "m.h5")

    assert model.get_compile_config() == before


@one_unless_whole
def test_a_file_with_another_optimizer_gives_its_weights_and_says_so(tmp_path: Path) -> None:
    quietly_saved(steps(compiled("own"), 2), tmp_path / "own.h5")
    quietly_saved(steps(compiled("own"), 2), tmp_path / "own.keras")
    bare = KERAS.Sequential([KERAS.Input((problems.WIDTH,)), *compiled().layers])
    quietly_saved(bare, tmp_path / "bare.h5")
    est = estimator(steps(compiled("adam"), 2))
    before = state(est.get_model().optimizer)

    with pytest.warns(UserWarning, match="Halved.*weights were loaded, and this model's Adam"):
        est.load_weights(tmp_path / "own.h5")
    with pytest.warns(UserWarning, match=r"cannot be compiled here .*Halved.*weights were loaded"):
        est.load_weights(tmp_path / "own.keras")
    with pytest.warns(UserWarning, match=r"bare\.h5 has no optimizer"):
        est.load_weights(tmp_path / "bare.h5")

    after = state(est.get_model().optimizer)
    assert any(np.any(value) for value in before)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
