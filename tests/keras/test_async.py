"""Asynchronous training and rounds with Keras's own `fit`, on every backend."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flavour import FLAVOUR, KERAS, one_unless_whole, two_unless_whole

from kindler import Estimator
from kindler.errors import ConfigError
from kindler.strategies import Async, LocalSGD


def clouds() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = np.concatenate([random.normal(0, 1, (200, 10)), random.normal(2, 1, (200, 10))])
    return x.astype(np.float32), np.repeat([0.0, 1.0], 200).astype(np.float32)[:, None]


def classifier(optimizer: Any = None) -> Any:
    first = [KERAS.initializers.RandomNormal(stddev=0.3, seed=n) for n in range(3)]
    model = KERAS.Sequential(
        [
            KERAS.layers.Input((10,)),
            KERAS.layers.Dense(12, activation="relu", kernel_initializer=first[0]),
            KERAS.layers.Dense(7, activation="relu", kernel_initializer=first[1]),
            KERAS.layers.Dense(1, activation="sigmoid", kernel_initializer=first[2]),
        ]
    )
    optimizer = optimizer or KERAS.optimizers.Adam(0.02)
    model.compile(optimizer=optimizer, loss="binary_crossentropy", metrics=["accuracy"])
    return model


@two_unless_whole
def test_workers_of_a_parameter_server_learn_with_the_callbacks_of_keras() -> None:
    x, y = clouds()
    est = Estimator.from_keras(model=classifier(), workers=2)
    history = est.fit(
        (x, y),
        epochs=5,
        batch_size=32,
        validation_data=(x, y),
        callbacks=[KERAS.callbacks.LearningRateScheduler(lambda epoch: 0.02 * 0.9**epoch)],
        strategy=Async(max_staleness=1, lock=True),
        verbose=0,
    )

    optimizer = est.get_model().optimizer
    assert np.mean((est.predict(x) > 0.5) == y) >= 0.98
    assert history["updates"] == history["steps"] == [26] * 5
    assert history["num_samples"] == history["val_num_samples"] == [400] * 5
    assert max(history["staleness_max"]) <= 1
    assert history["val_accuracy"][-1] == pytest.approx(np.mean((est.predict(x) > 0.5) == y))
    assert int(np.asarray(optimizer.iterations)) == 130
    if FLAVOUR != "tf_keras":  # which does not count the rate among what an optimizer keeps
        assert float(np.asarray(optimizer.learning_rate)) == pytest.approx(0.02 * 0.9**4)


@one_unless_whole
def test_one_worker_and_its_server_train_as_keras_alone_does() -> None:
    x, y = clouds()
    alone = classifier()
    order = np.arange(400)
    alone.fit(x[order], y[order], epochs=2, batch_size=40, shuffle=False, verbose=0)
    est = Estimator.from_keras(model=classifier(), workers=1)
    est.fit((x, y), epochs=2, batch_size=40, shuffle=False, strategy="async", verbose=0)

    for mine, wanted in zip(est.get_model().get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-4)


class DieOnce(KERAS.callbacks.Callback):
    """Of the workers, the first one that is in the third epoch dies."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.marker, self.epoch = str(marker), 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.epoch == 2 and batch == 5 and not os.path.exists(self.marker):
            os.close(os.open(self.marker, os.O_CREAT))
            os.kill(os.getpid(), signal.SIGKILL)


@one_unless_whole
def test_rounds_with_deaths_and_without_and_several_servers_learn_too(tmp_path: Path) -> None:
    x, y = clouds()
    est = Estimator.from_keras(model=classifier(), workers=2)
    rounds = {"epochs": 4, "batch_size": 32, "strategy": LocalSGD(every_steps=4)}
    history = est.fit((x, y), verbose=0, **rounds)
    disturbed = Estimator.from_keras(model=classifier(), workers=2)
    figures = disturbed.fit((x, y), verbose=0, callbacks=[DieOnce(tmp_path / "dead")], **rounds)
    assert (tmp_path / "dead").exists()
    assert figures["loss"] == history["loss"]
    for mine, wanted in zip(disturbed.get_model().get_weights(), est.get_model().get_weights(), strict=True):
        np.testing.assert_array_equal(mine, wanted)
    again = Estimator.from_keras(model=classifier(), workers=2)
    shared = again.fit((x, y), epochs=4, batch_size=32, strategy=Async(shards=2), verbose=0)

    for found in (est, again):
        assert np.mean((found.predict(x) > 0.5) == y) >= 0.98
    assert history["rounds"] == [4] * 4
    assert shared["updates"] == [26] * 4
    again.fit((x, y), epochs=1, batch_size=32, strategy="allreduce", verbose=0)  # the joined state is whole
    assert int(np.asarray(again.get_model().optimizer.iterations)) == 4 * 26 + 13


class OwnStep(KERAS.Sequential):
    """A model that trains itself in a way of its own."""

    def train_step(self, *args: Any) -> Any:
        return super().train_step(*args)


def test_a_train_step_of_the_users_own_is_refused_on_the_driver() -> None:
    model = OwnStep([KERAS.layers.Input((10,)), KERAS.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")

    with pytest.raises(ConfigError, match="strategy='async': OwnStep has its own train_step"):
        Estimator.from_keras(model=model, workers=2).fit(clouds(), strategy="async", verbose=0)
