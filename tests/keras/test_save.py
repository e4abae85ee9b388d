"""Trained models are saved in Keras's own formats, and score what they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import numpy as np
import pandas as pd
import problems
import pyarrow as pa
import pytest
from flavour import FLAVOUR, KERAS, one_is_enough, one_unless_whole

from kindler import Estimator
from kindler.errors import ConfigError, UntrustedError

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

DATA = problems.problem(40)
OPTIONS = {"batch_size": 10, "verbose": 0, "feature_cols": "x", "label_cols": "y"}


def estimator() -> Estimator:
    return Estimator.from_keras(
        model=problems.classifier, config={"flavour": FLAVOUR}, workers=1, engine="local"
    )


@pytest.fixture(scope="module")
def trained() -> Estimator:
    est = estimator()
    est.fit(DATA, epochs=2, **OPTIONS)
    return est


@pytest.fixture(scope="module")
def scores(trained: Estimator) -> np.ndarray:
    return np.asarray(trained.get_model().predict(DATA["x"], verbose=0))


def test_the_model_of_a_creator_predicts_as_the_estimator_does(
    trained: Estimator, scores: np.ndarray
) -> None:
    assert trained.predict(DATA["x"]) == pytest.approx(scores, abs=1e-6)
    assert trained.predict(DATA["x"], batch_size=7) == pytest.approx(scores, abs=1e-6)


def test_a_keras_file_loads_in_plain_keras(trained: Estimator, scores: np.ndarray, tmp_path: Path) -> None:
    trained.save(tmp_path / "model.keras")

    plain = KERAS.saving.load_model(str(tmp_path / "model.keras"))
    assert np.asarray(plain.predict(DATA["x"], verbose=0)) == pytest.approx(scores, abs=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_what_was_saved_is_loaded_and_trained_on(
    trained: Estimator, scores: np.ndarray, tmp_path: Path, name: str
) -> None:
    trained.save(tmp_path / name)
    again = estimator().load_weights(tmp_path / name)

    assert again.predict(DATA["x"]) == pytest.approx(scores, abs=1e-6)
    if name == "model.keras":
        goes_on, went_on = again.fit(DATA, epochs=1, **OPTIONS), trained.evaluate(DATA, verbose=0)
        assert goes_on["loss"][0] < went_on["loss"] * 1.5


@pytest.mark.skipif(FLAVOUR == "torch", reason="Keras on PyTorch exports other formats")
@pytest.mark.skipif(FLAVOUR == "jax", reason="Keras needs jax2tf and TensorFlow in one process for it")
def test_a_folder_is_a_saved_model_for_serving(
    trained: Estimator, scores: np.ndarray, tmp_path: Path
) -> None:
    import tensorflow as tf

    trained.save(tmp_path / "served")

    served = tf.saved_model.load(str(tmp_path / "served"))
    assert served.serve(DATA["x"]).numpy() == pytest.approx(scores, abs=1e-6)
    with pytest.raises(ConfigError, match="is an existing folder, which is not overwritten"):
        trained.save(tmp_path / "served")
    with pytest.raises(ConfigError, match="an exported SavedModel cannot be trained on"):
        trained.load_weights(tmp_path / "served")


@one_is_enough
def test_a_suffix_that_keras_does_not_write_is_refused(trained: Estimator, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Keras writes \.keras .*\.weights\.h5"):
        trained.save(tmp_path / "model.pt")
    assert list(tmp_path.iterdir()) == []


@one_is_enough
def test_predictions_come_back_in_the_form_of_the_data(trained: Estimator, scores: np.ndarray) -> None:
    frame = pd.DataFrame({"id": range(40), "x": list(DATA["x"])})
    as_dict = trained.predict({"x": DATA["x"]}, output_cols="p")
    as_frame = trained.predict(frame)
    as_table = trained.predict(pa.table({"x": pa.array(list(DATA["x"]), pa.list_(pa.float32()))}))

    assert as_dict["p"] == pytest.approx(scores, abs=1e-6)
    assert list(as_frame.columns) == ["id", "x", "prediction"]
    assert np.stack(as_frame["prediction"].to_list()) == pytest.approx(scores, abs=1e-6)
    assert np.array(as_table["prediction"].to_pylist()) == pytest.approx(scores, abs=1e-6)


def test_several_outputs_come_as_several(tmp_path: Path) -> None:
    config: dict[str, Any] = {"order": ["a", "b"]}
    est = Estimator.from_keras(model=models.two_by_two, config=config, workers=1, engine="local")
    random = np.random.default_rng(0)
    data = {"a": random.normal(size=(6, 2)), "b": random.normal(size=(6, 3))}

    scored = est.predict(data, feature_cols=["a", "b"], output_cols=["total", "chances"])

    assert scored["total"].shape == (6, 1)
    assert scored["chances"].shape == (6, 2)


@one_unless_whole
def test_outputs_that_a_model_names_keep_their_names() -> None:
    inputs = KERAS.Input((problems.WIDTH,), name="x")
    low, high = KERAS.layers.Dense(1, name="a")(inputs), KERAS.layers.Dense(2, name="b")(inputs)
    model = KERAS.Model(inputs, {"low": low, "high": high})
    est = Estimator.from_keras(model, workers=1, engine="local")

    scored, bare = est.predict({"x": DATA["x"]}), est.predict(DATA["x"])

    expected = model.predict(DATA["x"], verbose=0)
    assert sorted(bare) == ["high", "low"]
    assert sorted(scored) == ["high", "low", "x"]
    for name in ("low", "high"):
        assert scored[name] == pytest.approx(np.asarray(expected[name]), abs=1e-6)
        assert bare[name] == pytest.approx(np.asarray(expected[name]), abs=1e-6)


@one_unless_whole
def test_an_estimator_is_loaded_from_one_file_and_trains_on_with_its_optimizer(
    trained: Estimator, scores: np.ndarray, tmp_path: Path
) -> None:
    trained.save(tmp_path / "whole.estimator")
    trained.save(tmp_path / "model.keras")
    options = {**OPTIONS, "batch_size": 40, "shuffle": False}

    with pytest.raises(UntrustedError, match="it holds a model's code"):
        Estimator.load(tmp_path / "whole.estimator")
    whole = Estimator.load(tmp_path / "whole.estimator", trusted=True)
    of_keras = Estimator.load(tmp_path / "model.keras", trusted=True, workers=1, engine="local")

    assert whole.predict(DATA["x"]) == pytest.approx(scores, abs=1e-6)
    alone = KERAS.saving.load_model(str(tmp_path / "model.keras"))
    alone.train_on_batch(DATA["x"], DATA["y"])
    for est in (whole, of_keras):
        est.fit(DATA, epochs=1, **options)
        difference = problems.largest_difference(est.get_model().get_weights(), alone.get_weights())
        assert difference < 1e-6


@one_is_enough
def test_a_lambda_in_a_keras_file_needs_trust(tmp_path: Path) -> None:
    inputs = KERAS.Input((problems.WIDTH,))
    model = KERAS.Model(inputs, KERAS.layers.Lambda(lambda x: x * 2)(inputs))
    model.save(str(tmp_path / "m.keras"))

    with pytest.raises(UntrustedError, match="it holds a lambda"):
        Estimator.load(tmp_path / "m.keras")
    est = Estimator.load(tmp_path / "m.keras", trusted=True, workers=1, engine="local")
    assert est.predict(DATA["x"]) == pytest.approx(DATA["x"] * 2)


@one_is_enough
def test_the_latest_checkpoint_may_be_one_of_keras_own_callback(tmp_path: Path) -> None:
    est = estimator()
    saving = KERAS.callbacks.ModelCheckpoint(str(tmp_path / "epoch-{epoch}.keras"))
    est.fit(DATA, epochs=2, callbacks=[saving], **OPTIONS)

    found = Estimator.latest_checkpoint(tmp_path)

    assert found == str(tmp_path / "epoch-2.keras")
    again = estimator().load_checkpoint(found)
    assert again.predict(DATA["x"]) == pytest.approx(est.predict(DATA["x"]), abs=1e-6)
