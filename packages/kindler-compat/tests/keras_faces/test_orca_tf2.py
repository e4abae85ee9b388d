"""Orca's estimator for Keras: arguments, results and errors of the original."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flavour import FLAVOUR, KERAS

from kindler.compat.zoo.orca.data import XShards
from kindler.compat.zoo.orca.learn.tf2 import Estimator

pytestmark = pytest.mark.skipif(FLAVOUR != "torch", reason="the same code for every backend")

X = np.random.default_rng(0).normal(size=(22, 3)).astype("float32")
Y = (X[:, 0] > 0).astype("int64")
DATA = XShards.partition({"x": X, "y": Y}, num_shards=2, engine="local")


def model_creator(config: dict[str, Any]) -> Any:
    model = KERAS.Sequential([KERAS.layers.Input((3,)), KERAS.layers.Dense(2, activation="softmax")])
    model.compile(
        optimizer=KERAS.optimizers.SGD(config["lr"]),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def test_creators_are_trained_judged_scored_and_saved_under_every_backend(tmp_path: Path) -> None:
    est = Estimator.from_keras(
        model_creator=model_creator, config={"lr": 0.1}, backend="tf2", workers_per_node=2
    )
    stats = est.fit(data=DATA, epochs=2, batch_size=8, steps_per_epoch=3, validation_data=DATA, verbose=0)
    assert (stats["epochs"], stats["steps"], stats["verbose"]) == (2, 3, 0)
    assert {
        name: len(stats[name]) for name in ("loss", "accuracy", "val_loss", "val_accuracy")
    } == dict.fromkeys(("loss", "accuracy", "val_loss", "val_accuracy"), 2)

    result = est.evaluate(DATA, batch_size=8, verbose=0)
    scored = np.concatenate([shard["prediction"] for shard in est.predict(DATA, verbose=0).collect()])
    assert set(result) == {"validation_loss", "validation_accuracy"}
    assert result["validation_accuracy"] == pytest.approx(np.mean(scored.argmax(1) == Y))  # every row once
    assert result["validation_loss"] == pytest.approx(stats["val_loss"][-1], rel=1e-5)

    est.save(str(tmp_path / "model.keras"))
    est.save_checkpoint(str(tmp_path / "checkpoint"))
    for read, name in (("load", "model.keras"), ("load_checkpoint", "checkpoint")):
        other = Estimator.from_keras(model_creator=model_creator, config={"lr": 0.1}, backend="ray")
        getattr(other, read)(str(tmp_path / name))
        again = np.concatenate([shard["prediction"] for shard in other.predict(DATA, verbose=0).collect()])
        np.testing.assert_allclose(again, scored, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"backend": "bigdl"}, "backend are supported"),
        ({"config": {"batch_size": 3}}, "do not specify batch_size"),
        ({"model_creator": None}, "model_creator must be a function"),
        ({"workers_per_node": 0}, "workers_per_node must be at least 1"),
    ],
)
def test_what_cannot_work_is_a_runtime_error(options: Any, problem: str) -> None:
    with pytest.raises(RuntimeError, match=problem):
        Estimator.from_keras(**{"model_creator": model_creator, "config": {"lr": 0.1}, **options})


class Endless:
    """Batches without an end: a row is 1 where `config` says so."""

    def __init__(self, batch_size: int, wrong: int) -> None:
        self.batch_size, self.wrong = batch_size, wrong

    def __iter__(self) -> Any:
        for number in count():
            rows = (np.arange(self.batch_size) + number * self.batch_size) % 22
            yield X[rows], Y[rows] if number < self.wrong else 1 - Y[rows]


def endless(config: dict[str, Any], batch_size: int) -> Any:
    return Endless(batch_size, config["wrong"])


def test_steps_of_validation_and_the_config_of_creators_are_heeded() -> None:
    est = Estimator.from_keras(
        model_creator=model_creator, config={"lr": 0.5, "wrong": 0}, backend="tf2", workers_per_node=2
    )
    stats = est.fit(
        endless, epochs=3, batch_size=22, steps_per_epoch=3, validation_data=endless, validation_steps=2,
        data_config={"wrong": 2**31}, verbose=0,
    )  # fmt: skip
    scored = np.concatenate([shard["prediction"] for shard in est.predict(DATA, verbose=0).collect()])
    right = scored.argmax(1) == Y
    assert stats["val_accuracy"][-1] == pytest.approx(right.mean())  # labels as they are
    assert right.mean() > 0.5
    opposite = est.evaluate(endless, batch_size=22, num_steps=1, verbose=0)
    assert opposite["validation_accuracy"] == pytest.approx(1 - right.mean())
    half = est.evaluate(endless, batch_size=22, num_steps=2, data_config={"wrong": 2}, verbose=0)
    assert half["validation_accuracy"] == pytest.approx(0.5)  # two local batches of four have these labels

    first = est.evaluate(DATA, batch_size=5, num_steps=2, verbose=0)
    assert first["validation_accuracy"] == pytest.approx(right[:10].mean())
    fitted = est.fit(
        DATA, epochs=1, batch_size=22, validation_data=DATA, validation_steps=1, steps_per_epoch=1, verbose=0
    )
    assert len(fitted["val_loss"]) == 1


def test_what_would_be_left_out_is_refused(tmp_path: Path) -> None:
    est = Estimator.from_keras(model_creator=model_creator, config={"lr": 0.1}, backend="tf2")
    path = tmp_path / "model.keras"
    path.write_text("mine")
    for call, problem in (
        (lambda: est.predict(DATA, steps=1), "predict: not supported: steps=1"),
        (lambda: est.evaluate(DATA, callbacks=[object()]), "evaluate: not supported: callbacks="),
        (lambda: est.evaluate(DATA, num_steps=0), "num_steps must be a whole number of at least 1"),
        (lambda: est.save(str(path), overwrite=False), "exists"),
        (lambda: est.save(str(path), save_format="h5"), "means the format 'keras'"),
        (lambda: est.load_weights(str(path), by_name=True), "not supported: by_name=True"),
        (lambda: Estimator.from_keras(model_creator=model_creator, worker_per_node=2), "worker_per_node=2"),
    ):
        with pytest.raises(RuntimeError, match=problem):
            call()
    assert path.read_text() == "mine"
