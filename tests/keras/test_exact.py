"""Several workers compute what one process would with plain `model.fit` over the same global batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import problems
import pytest
from flavour import one_is_enough, one_unless_whole, tensorflow_only

from kindler import Estimator
from kindler.errors import ConfigError

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

COLUMNS = {"feature_cols": "x", "label_cols": "y"}


def two_workers(config: dict[str, Any], creator: Any = problems.classifier, **options: Any) -> Estimator:
    return Estimator.from_keras(model=creator, config=config, workers=2, engine="local", **options)


@one_unless_whole  # on each of them two workers end as one process does
def test_one_and_two_workers_end_with_the_same_weights(flavour: str) -> None:
    data, trained = problems.problem(130), []
    for workers in (1, 2):
        est = Estimator.from_keras(
            model=problems.classifier, config={"flavour": flavour}, workers=workers, engine="local"
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
    model = synchronised(config) if given == "instance" else synchronised
    est = Estimator.from_keras(model, config=config, workers=2, engine="local")

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


@one_unless_whole  # rows are divided before any of them sees one
@pytest.mark.parametrize("workers", [1, 2])
def test_validation_split_trains_and_validates_on_the_rows_that_keras_would(
    flavour: str, workers: int
) -> None:
    config, data, share = {"flavour": flavour}, problems.problem(41), 0.3  # 28.7 rows to train on
    est = Estimator.from_keras(problems.classifier, config=config, workers=workers, engine="local")
    rows = {"epochs": 2, "batch_size": 28, "shuffle": False, "verbose": 0}

    history = est.fit(data, validation_split=share, **rows, **COLUMNS)

    alone = problems.seeded(problems.classifier, config)
    told = alone.fit(data["x"], data["y"], validation_split=share, **rows).history
    assert history["num_samples"] == [28, 28]
    assert history["val_num_samples"] == [13, 13]
    for figure in ("loss", "accuracy", "val_loss", "val_accuracy"):
        assert history[figure] == pytest.approx(told[figure], abs=1e-5), figure
    judged = {name: column[28:] for name, column in data.items()}
    assert est.evaluate(judged, verbose=0, **COLUMNS)["loss"] == pytest.approx(told["val_loss"][-1], abs=1e-5)
    assert problems.largest_difference(est.get_model().get_weights(), alone.get_weights()) < 1e-5


@one_is_enough
def test_validation_split_needs_a_share_and_nothing_else_to_validate_with(flavour: str) -> None:
    est, data = two_workers({"flavour": flavour}), problems.problem(20)
    with pytest.raises(ConfigError, match="validation_split and validation_data were both passed"):
        est.fit(data, validation_split=0.5, validation_data=data, verbose=0, **COLUMNS)
    with pytest.raises(ConfigError, match="validation_split must be a number between 0 and 1; received 1.5"):
        est.fit(data, validation_split=1.5, verbose=0, **COLUMNS)
    with pytest.raises(ConfigError, match="of 20 rows, 0 would be left to train on and 20 to validate"):
        est.fit(data, validation_split=0.999, verbose=0, **COLUMNS)


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
