"""Several workers compute what one process would with plain `model.fit` over the same global batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import problems
import pytest
import watchers
from flavour import one_is_enough, one_unless_whole, tensorflow_only, two_unless_whole

from kindler import Estimator, RunSettings
from kindler.data.column_options import ColumnOptions
from kindler.errors import ConfigError

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

COLUMNS = {"feature_cols": "x", "label_cols": "y"}
FIGURES = ("loss", "accuracy", "auc")


def two_workers(config: dict[str, Any], creator: Any = problems.classifier, **options: Any) -> Estimator:
    return Estimator.from_keras(model_creator=creator, config=config, workers=2, engine="local", **options)


def identical(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sgd", marks=one_is_enough)])
def test_two_workers_of_uneven_rows_take_the_steps_of_one_process(
    keras: Any, flavour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    data, cuts = problems.problem(130), (93, 37)
    config = {"flavour": flavour, "optimizer": optimizer, "auc": True}
    problems.deal(monkeypatch, cuts)
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
    batches = problems.global_batches(
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
    problems.deal(monkeypatch, cuts)

    history = two_workers(config).fit(
        data,
        epochs=2,
        batch_size=10,
        callbacks=[problems.note_weights(keras, tmp_path)],
        verbose=0,
        **COLUMNS,
    )

    alone = problems.seeded(problems.classifier, config)
    batches = problems.global_batches(
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
    problems.deal(monkeypatch, cuts)
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


@one_unless_whole  # on each of them two workers end as one process does
def test_one_and_two_workers_end_with_the_same_weights(flavour: str) -> None:
    data, trained = problems.problem(130), []
    for workers in (1, 2):
        est = Estimator.from_keras(
            model_creator=problems.classifier, config={"flavour": flavour}, workers=workers, engine="local"
        )
        est.fit(data, epochs=2, batch_size=26, verbose=0, **COLUMNS)
        trained.append(est.get_model().get_weights())

    assert problems.largest_difference(*trained) < 1e-5


def synchronised(config: dict[str, Any]) -> Any:
    keras = problems.library(config)
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(synchronized=True, name="norm")]
    model = keras.Sequential([keras.Input((problems.WIDTH,)), *layers, keras.layers.Dense(1)])
    model.compile(loss="mse")
    return model


@tensorflow_only  # other backends have no such argument
@pytest.mark.parametrize("given", ["creator", "instance"])
def test_synchronised_batchnorm_is_refused_for_several_workers(keras: Any, flavour: str, given: str) -> None:
    config = {"flavour": flavour}
    model = {"model": synchronised(config)} if given == "instance" else {"model_creator": synchronised}
    est = Estimator.from_keras(**model, config=config, workers=2, engine="local")

    with pytest.raises(ConfigError, match=r"synchronized=True \('norm'\)(?s:.*)Hint: leave out synchronized"):
        est.fit(problems.problem(20), verbose=0, **COLUMNS)


def masked(config: dict[str, Any]) -> Any:
    keras = problems.library(config)
    layers = keras.layers
    ignored = config["ignored"]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0 if ignored else None)
    model = keras.Sequential(
        [layers.Input((4,)), layers.Embedding(9, 3, mask_zero=not ignored), layers.Dense(3)]
    )
    model.compile(optimizer="sgd", loss=loss)
    return model


@one_is_enough
@pytest.mark.parametrize(("ignored", "complaint"), [(False, "carries a mask"), (True, "ignore_class=0")])
def test_a_mean_over_something_else_than_rows_is_refused_for_several_workers(
    flavour: str, ignored: bool, complaint: str
) -> None:
    est = two_workers({"flavour": flavour, "ignored": ignored}, masked)
    tokens = np.random.default_rng(0).integers(0, 9, (12, 4))

    with pytest.raises(ConfigError, match=complaint):
        est.fit({"x": tokens, "y": tokens % 3}, verbose=0, **COLUMNS)


@two_unless_whole
def test_frozen_weights_stay_as_they_are_bit_by_bit(
    keras: Any, flavour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems.deal(monkeypatch, (93, 37))
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


@one_unless_whole  # on each of them a run that was cut off ends as a whole one
def test_a_second_fit_goes_on_as_if_there_had_been_one(flavour: str) -> None:
    between = (
        "batchnorm" if flavour == "tf_keras" else "both"
    )  # dropout of Keras 2 draws anew in every process
    config, data = {"flavour": flavour, "between": between}, problems.problem(64)
    options = {"batch_size": 16, "verbose": 0, **COLUMNS}
    once, twice = two_workers(config), two_workers(config)

    whole = once.fit(data, epochs=4, **options)
    first = twice.fit(data, epochs=2, **options)
    second = twice.fit(data, epochs=2, **options)

    assert problems.largest_difference(once.get_model().get_weights(), twice.get_model().get_weights()) == 0
    assert whole["loss"] == [*first["loss"], *second["loss"]]
    assert second["epoch"] == [3, 4]


@pytest.mark.parametrize("kind", ["sample_weight_col", pytest.param("class_weight", marks=one_unless_whole)])
def test_weights_of_rows_and_of_classes_are_those_of_one_process(
    keras: Any, flavour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    data, cuts, config = problems.problem(90), (50, 40), {"flavour": flavour, "weighted": True}
    problems.deal(monkeypatch, cuts)
    weigh = {"sample_weight_col": "w"} if kind == "sample_weight_col" else {"class_weight": {0: 0.3, 1: 2.0}}
    # Another seed than the first test, and through sockets instead of shared memory.
    est = two_workers(config, seed=5, settings=RunSettings(shared_memory=False))

    history = est.fit(data, epochs=2, batch_size=20, verbose=0, **COLUMNS, **weigh)

    columns = {**COLUMNS, "weight_col": weigh.get("sample_weight_col")}
    alone = problems.seeded(problems.classifier, config, seed=5)
    batches = problems.global_batches(
        data, cuts, batch_size=20, epochs=2, options=ColumnOptions(**columns), folder=tmp_path, seed=5
    )
    options = {} if "sample_weight_col" in weigh else weigh
    told = problems.fit_alone(keras, alone, batches, **options)
    assert problems.largest_difference(est.get_model().get_weights(), alone.get_weights()) < 1e-5
    name = next(name for name in told if "mse" in name or "mean_squared" in name)
    for figure in ("loss", "accuracy", name):
        assert history[figure] == pytest.approx(told[figure], abs=1e-5), figure
