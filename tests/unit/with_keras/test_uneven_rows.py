"""Several workers with uneven numbers of rows compute what one process would with plain `model.fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import numpy as np
import problems
import pytest
import watchers
from flavour import FLAVOUR, one_is_enough, one_unless_whole, two_unless_whole

from kindler import Columns, Estimator, RunSettings
from kindler.data.column_options import ColumnOptions
from tests.keras.test_exact import COLUMNS, two_workers
from tests.keras.test_models import DATA, WHOLE, same
from tests.unit.with_keras.uneven import deal, global_batches

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

FIGURES = ("loss", "accuracy", "auc")


def identical(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sgd", marks=one_is_enough)])
def test_two_workers_of_uneven_rows_take_the_steps_of_one_process(
    keras: Any, flavour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    data, cuts = problems.problem(130), (93, 37)
    config = {"flavour": flavour, "optimizer": optimizer, "auc": True}
    deal(monkeypatch, cuts)
    est = two_workers(config)

    history = est.fit(
        data,
        epochs=4,
        batch_size=26,
        validation_data=data,
        callbacks=[problems.note_weights(keras, tmp_path)],
        verbose=0,
        **COLUMNS,
    )

    alone = problems.seeded(problems.classifier, config)
    batches = global_batches(
        data, cuts, batch_size=26, epochs=4, options=ColumnOptions(**COLUMNS), folder=tmp_path
    )
    told = problems.fit_alone(keras, alone, batches)
    first, second = problems.noted_weights(tmp_path)
    assert sum(history["steps"]) == 20
    assert identical(first, second)
    assert problems.largest_difference(first, alone.get_weights()) < 1e-4
    for name in FIGURES:
        assert history[name] == pytest.approx(told[name], abs=1e-5), name

    judged = alone.evaluate(data["x"], data["y"], batch_size=26, verbose=0, return_dict=True)
    evaluated = est.evaluate(data, batch_size=26, verbose=0)
    assert evaluated["num_samples"] == history["val_num_samples"][-1] == 130
    for name in FIGURES:
        assert history[f"val_{name}"][-1] == pytest.approx(judged[name], abs=1e-5), name
        assert evaluated[name] == pytest.approx(judged[name], abs=1e-5), name


@pytest.mark.parametrize("cuts", [pytest.param((30, 0), marks=one_is_enough), (40, 2)])
def test_a_worker_without_rows_in_a_step_changes_nothing(
    keras: Any, flavour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, int]
) -> None:
    data, config = problems.problem(sum(cuts)), {"flavour": flavour, "optimizer": "sgd"}
    deal(monkeypatch, cuts)

    history = two_workers(config).fit(
        data,
        epochs=2,
        batch_size=10,
        callbacks=[problems.note_weights(keras, tmp_path)],
        verbose=0,
        **COLUMNS,
    )

    alone = problems.seeded(problems.classifier, config)
    batches = global_batches(
        data, cuts, batch_size=10, epochs=2, options=ColumnOptions(**COLUMNS), folder=tmp_path
    )
    told = problems.fit_alone(keras, alone, batches)
    first, second = problems.noted_weights(tmp_path)
    assert history["num_samples"] == [sum(cuts)] * 2
    assert identical(first, second)
    assert problems.largest_difference(first, alone.get_weights()) < 1e-5
    for name in ("loss", "accuracy"):
        assert history[name] == pytest.approx(told[name], abs=1e-5), name


def test_statistics_of_batchnorm_are_those_of_the_rows_of_all_ranks(
    flavour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = (93, 37)
    deal(monkeypatch, cuts)
    config = {"flavour": flavour, "between": "batchnorm"}
    watch = watchers.LocalStatistics(tmp_path)

    two_workers(config).fit(
        problems.problem(130), epochs=1, batch_size=26, callbacks=[watch], verbose=0, **COLUMNS
    )

    def noted(when: str, rank: int) -> list[np.ndarray]:
        return list(np.load(tmp_path / f"{when}-{rank}.npz").values())

    assert identical(noted("after", 0), noted("after", 1))
    assert not identical(noted("before", 0), noted("before", 1))
    shares = np.array([93, 37]) / 130
    (means, variances), (mean, variance) = (
        zip(noted("before", 0), noted("before", 1), strict=True),
        noted("after", 0),
    )
    assert mean == pytest.approx(shares @ np.stack(means), rel=1e-5)
    spread = shares @ (np.stack(means) - shares @ np.stack(means)) ** 2
    assert spread.min() > 0
    assert variance == pytest.approx(shares @ np.stack(variances) + spread, rel=1e-5)


@two_unless_whole
def test_frozen_weights_stay_as_they_are_bit_by_bit(
    keras: Any, flavour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deal(monkeypatch, (93, 37))
    model = problems.seeded(problems.classifier, {"flavour": flavour, "between": "batchnorm"})
    model.layers[1].trainable = False
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="binary_crossentropy")
    frozen = [weight.copy() for weight in model.layers[1].get_weights()]
    statistics = model.layers[2].get_weights()[2:]

    Estimator.from_keras(model, workers=2, engine="local").fit(
        problems.problem(130), epochs=2, batch_size=26, verbose=0, **COLUMNS
    )

    assert identical(model.layers[1].get_weights(), frozen)
    assert not identical(model.layers[2].get_weights()[2:], statistics)


@pytest.mark.parametrize("kind", ["weight_col", pytest.param("class_weight", marks=one_unless_whole)])
def test_weights_of_rows_and_of_classes_are_those_of_one_process(
    keras: Any, flavour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    data, cuts, config = problems.problem(90), (50, 40), {"flavour": flavour, "weighted": True}
    deal(monkeypatch, cuts)
    weigh: dict[str, Any] = (
        {"weight_col": "w"} if kind == "weight_col" else {"class_weight": {0: 0.3, 1: 2.0}}
    )
    # Another seed than the first test, and through sockets instead of shared memory.
    est = two_workers(config, seed=5, settings=RunSettings(shared_memory=False))

    history = est.fit(data, epochs=2, batch_size=20, verbose=0, columns=Columns(**weigh), **COLUMNS)

    columns = {**COLUMNS, "weight_col": weigh.get("weight_col")}
    alone = problems.seeded(problems.classifier, config, seed=5)
    batches = global_batches(
        data, cuts, batch_size=20, epochs=2, options=ColumnOptions(**columns), folder=tmp_path, seed=5
    )
    options = {} if "weight_col" in weigh else weigh
    told = problems.fit_alone(keras, alone, batches, **options)
    assert problems.largest_difference(est.get_model().get_weights(), alone.get_weights()) < 1e-5
    name = next(name for name in told if "mse" in name or "mean_squared" in name)
    for figure in ("loss", "accuracy", name):
        assert history[figure] == pytest.approx(told[figure], abs=1e-5), figure


@two_unless_whole
def test_layers_and_functions_defined_in_the_program_travel_and_gradients_are_clipped_once(
    keras: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shift(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x + 1.0

    def halved(x: Any) -> Any:
        return 0.5 * x

    def off_by(y: Any, predicted: Any) -> Any:
        return keras.losses.mean_absolute_error(y, predicted)

    def made() -> Any:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((problems.WIDTH,))
        hidden = Shift()(keras.layers.Dense(4, activation=halved)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        clipped = keras.optimizers.SGD(0.5, global_clipnorm=0.1)
        model.compile(optimizer=clipped, loss="mse", metrics=[off_by])
        return model

    deal(monkeypatch, (29, 11))
    mine, alone = made(), made()
    history = Estimator.from_keras(model=mine, workers=2, engine="local").fit(DATA, **COLUMNS, **WHOLE)

    problems.batches_of_all(alone, DATA["x"], DATA["y"], steps=3)
    assert problems.largest_difference(mine.get_weights(), alone.get_weights()) < 1e-5
    assert history["off_by"][-1] < history["off_by"][0]


def test_embeddings_penalties_and_schedules_are_those_of_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = np.random.default_rng(2)
    data = {"x": random.integers(0, 20, size=(40, 4)), "y": random.normal(size=40).astype(np.float32) * 5}
    deal(monkeypatch, (29, 11))
    config = {"flavour": FLAVOUR}
    est = two_workers(config, models.words)

    est.fit(data, **COLUMNS, **{**WHOLE, "epochs": 4})

    alone = problems.seeded(models.words, config)
    problems.batches_of_all(alone, data["x"], data["y"], steps=4)
    assert same(est, alone)
