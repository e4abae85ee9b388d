"""Every kind of model that Keras can train, several workers train alike."""

from __future__ import annotations

from typing import Any

import models
import numpy as np
import problems
import pytest
from flavour import FLAVOUR, KERAS, one_is_enough, one_unless_whole, tensorflow_only, two_unless_whole

from kindler import Estimator
from kindler.errors import ConfigError, UntrainedWarning

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

DATA = problems.problem(40)
COLUMNS = {"feature_cols": "x", "label_cols": "y"}
# All rows make one step, so that one process does the same with `train_on_batch`.
WHOLE = {"epochs": 3, "batch_size": 40, "verbose": 0}


def pairs() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    a, b = random.normal(size=(40, 2)).astype(np.float32), random.normal(size=(40, 3)).astype(np.float32)
    total = a.sum(1) + b.sum(1)
    return {"a": a, "b": b, "sum": total, "sign": (total > 0).astype(np.int64)}


def two_workers(model: Any, **options: Any) -> Estimator:
    return Estimator.from_keras(model, workers=2, engine="local", **options)


def same(est: Estimator, alone: Any, tolerance: float = 1e-5) -> bool:
    difference = problems.largest_difference(est.get_model().get_weights(), alone.get_weights())
    assert difference < tolerance, difference
    return True


@two_unless_whole
def test_several_inputs_and_outputs_go_by_their_names() -> None:
    data, config = pairs(), {"order": ["b", "a"], "flavour": FLAVOUR}
    est = two_workers(models.two_by_two, config=config)

    # The columns are named in another order than the model's inputs and outputs.
    history = est.fit(data, feature_cols=["a", "b"], label_cols=["sign", "sum"], **WHOLE)

    alone = problems.seeded(models.two_by_two, config)
    x = {name: data[name] for name in ("a", "b")}
    y = {name: data[name] for name in ("sum", "sign")}
    problems.batches_of_all(alone, x, y, steps=3)
    assert same(est, alone)
    assert history["loss"][-1] < history["loss"][0]
    scored = est.predict(x, output_cols=["total", "chances"])
    total, sign = scored["total"], scored["chances"]
    assert total.shape == (40, 1)
    assert sign.shape == (40, 2)
    assert total == pytest.approx(np.asarray(alone.predict(x, verbose=0)[0]), abs=1e-5)


@one_is_enough
def test_several_inputs_and_outputs_go_by_their_places_where_names_differ() -> None:
    data, config = pairs(), {"order": ["a", "b"], "named": False, "flavour": FLAVOUR}
    renamed = {"left": data["a"], "right": data["b"], "how_much": data["sum"], "which": data["sign"]}
    est = two_workers(models.two_by_two, config=config)

    est.fit(renamed, feature_cols=["left", "right"], label_cols=["how_much", "which"], **WHOLE)

    alone = problems.seeded(models.two_by_two, config)
    problems.batches_of_all(alone, [data["a"], data["b"]], [data["sum"], data["sign"]], steps=3)
    assert same(est, alone)


@one_unless_whole
def test_a_model_that_is_called_with_a_dict_gets_one() -> None:
    data = pairs()
    est = two_workers(models.by_name, inputs="dict")

    est.fit(data, feature_cols=["a", "b"], label_cols="sum", **WHOLE)

    predicted = est.predict({"a": data["a"], "b": data["b"]})["prediction"]
    trained = est.get_model()
    again = trained.predict({"a": data["a"], "b": data["b"]}, verbose=0)
    assert predicted == pytest.approx(np.asarray(again), abs=1e-5)


@two_unless_whole
@pytest.mark.parametrize("built", [True, pytest.param(False, marks=one_unless_whole)])
def test_a_subclassed_instance_is_trained_in_place(keras: Any, built: bool) -> None:
    def loss_of_my_own(y: Any, predicted: Any) -> Any:
        return keras.losses.binary_crossentropy(y, predicted) * 3.0

    def made() -> Any:
        keras.utils.set_random_seed(1)
        model = models.Subclassed(units=7)
        model.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss_of_my_own, metrics=["accuracy"])
        if built:
            model(DATA["x"][:1])
        return model

    mine, alone = made(), made()
    est = two_workers(mine)

    history = est.fit(DATA, **COLUMNS, **WHOLE)

    assert est.get_model() is mine
    assert est.predict(DATA["x"]) == pytest.approx(np.asarray(mine.predict(DATA["x"], verbose=0)), abs=1e-6)
    assert history["loss"][-1] < history["loss"][0]
    if built:  # otherwise its first weights are drawn on the workers
        problems.batches_of_all(alone, DATA["x"], DATA["y"], steps=3)
        assert same(est, alone)


def test_a_train_step_of_the_users_own_is_shared_too() -> None:
    config = {"flavour": FLAVOUR}
    est = two_workers(models.own_step, config=config)

    history = est.fit(DATA, **COLUMNS, **WHOLE)

    alone = problems.seeded(models.own_step, config)
    before = alone.evaluate(DATA["x"], DATA["y"], batch_size=40, verbose=0)
    problems.batches_of_all(alone, DATA["x"], DATA["y"], steps=3)
    assert same(est, alone)
    assert history["twice"][0] == pytest.approx(2 * before, rel=1e-4), "the mean over the ranks"


def test_mixed_precision_trains_like_one_process() -> None:
    policy = "mixed_float16" if FLAVOUR in ("tensorflow", "tf_keras") else "mixed_bfloat16"
    config = {"policy": policy, "flavour": FLAVOUR}
    est = two_workers(models.mixed, config=config, compile_args=models.mixed_arguments)

    est.fit(DATA, **COLUMNS, **WHOLE)

    alone = problems.seeded(models.mixed, {**config, "compiled": True})
    problems.batches_of_all(alone, DATA["x"], DATA["y"], steps=3)
    assert same(est, alone, 5e-3)


@pytest.mark.parametrize(
    "option",
    [
        pytest.param({"run_eagerly": True}, marks=tensorflow_only),
        pytest.param({"jit_compile": True}, marks=tensorflow_only),
        pytest.param(
            {"steps_per_execution": 3},
            marks=pytest.mark.skipif(FLAVOUR == "torch", reason="Keras on PyTorch refuses it"),
        ),
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_of_compile_change_how_steps_run_and_not_what_they_compute(
    keras: Any, option: dict[str, Any]
) -> None:
    def made() -> Any:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((problems.WIDTH,))
        return keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(inputs))

    mine, alone = made(), made()
    arguments = {"loss": "binary_crossentropy", "metrics": ["accuracy"]}
    mine.compile(optimizer=keras.optimizers.SGD(0.05), **arguments, **option)
    alone.compile(optimizer=keras.optimizers.SGD(0.05), **arguments)

    options = {"epochs": 2, "batch_size": 8, "verbose": 0, "shuffle": False}
    history = two_workers(mine).fit(DATA, **COLUMNS, **options)

    for start in [*range(0, 40, 8)] * 2:
        rows = slice(start, start + 8)
        alone.train_on_batch(DATA["x"][rows], DATA["y"][rows])
    assert problems.largest_difference(mine.get_weights(), alone.get_weights()) < 1e-5
    assert history["steps"] == [5, 5]
    assert history["num_samples"] == [40, 40]


def test_a_model_that_keras_cannot_describe_is_refused_before_anything_starts(keras: Any) -> None:
    class Secretive(keras.layers.Layer):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function = function

        def call(self, x: Any) -> Any:
            return self.function(x)

        def get_config(self) -> dict[str, Any]:
            raise NotImplementedError("no config")

    inputs = keras.Input((problems.WIDTH,))
    model = keras.Model(inputs, Secretive(lambda x: x * 2)(inputs))
    model.compile(optimizer="sgd", loss="mse")

    with pytest.raises(ConfigError, match=r"(?s)cannot save this model.*Hint: .*a function as model=\.\.\."):
        two_workers(model).fit(DATA, **COLUMNS, **WHOLE)


@one_is_enough
def test_a_creator_that_nobody_trained_warns_and_has_the_weights_of_the_seed_in_every_worker() -> None:
    def used() -> tuple[Any, float]:
        est = two_workers(problems.classifier, config={"flavour": FLAVOUR})
        with pytest.warns(UntrainedWarning, match="never trained"):
            outputs = est.predict(DATA["x"])
        with pytest.warns(UntrainedWarning, match="never trained"):
            return outputs, est.evaluate(DATA, **COLUMNS, verbose=0)["loss"]

    (first, loss), (second, again) = used(), used()
    assert np.array_equal(first, second)
    y = np.asarray(DATA["y"]).reshape(-1, 1)
    assert loss == again == pytest.approx(-np.log(np.where(y, first, 1 - first)).mean(), rel=1e-4)


def bare() -> Any:
    return KERAS.Sequential([KERAS.layers.Input((problems.WIDTH,)), KERAS.layers.Dense(1)])


@one_is_enough
def test_a_dict_compiles_the_model_here_or_what_the_creator_returns() -> None:
    arguments = {"optimizer": "sgd", "loss": "mse"}
    mine = bare()
    for model in (mine, bare):
        est = two_workers(model, compile_args=arguments)
        assert est.fit(DATA, **COLUMNS, **WHOLE)["num_samples"] == [40] * 3
    assert mine.compiled
