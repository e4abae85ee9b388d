"""Epochs of Keras on TensorFlow have seeds of their own; steps in which nothing draws are compiled once."""

from __future__ import annotations

from typing import Any

import numpy as np
import problems
import pytest

from kindler.data.batches import Batch
from kindler.frameworks.keras.replica import KerasReplica

pytestmark = pytest.mark.keras


@pytest.fixture(autouse=True)
def _on_tensorflow(flavour: str) -> None:
    if flavour not in ("tensorflow", "tf_keras"):
        pytest.skip("TensorFlow alone compiles operations that keep what they draw from")


def noisy(config: Any) -> Any:
    """A model with noise that TensorFlow's own stateful operation draws."""
    import tensorflow as tf

    keras = problems.library(config)

    class Noise(keras.layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            return inputs + tf.random.normal(tf.shape(inputs))

    model = keras.Sequential([keras.layers.Input((problems.WIDTH,)), Noise(), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    return model


def made(creator: Any, config: dict[str, Any]) -> tuple[KerasReplica, Batch]:
    data = problems.problem(32)
    features, labels = (data["x"],), (data["y"].astype(np.float32),)
    spec = KerasReplica.make_spec(model=creator, config=config, keras_backend="tensorflow")
    replica = KerasReplica(spec, seed=3, feature_names=["x"], label_names=["y"])
    replica.build(features, labels)
    return replica, Batch(features, labels, rows=32, global_rows=32)


def epoch(replica: KerasReplica, batch: Batch, number: int, state: bytes) -> list[np.ndarray]:
    replica.load_state(state)
    replica.begin_epoch(number)
    for _ in range(2):
        replica.train_step(batch)
    return replica.read()


def test_noise_of_a_compiled_step_is_the_same_whenever_an_epoch_begins(flavour: str) -> None:
    replica, batch = made(noisy, {"flavour": flavour})
    state = replica.state()

    first, other, again = (epoch(replica, batch, number, state) for number in (1, 2, 1))

    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])


def test_steps_are_compiled_once_where_nothing_draws_in_them(flavour: str) -> None:
    replica, batch = made(problems.classifier, {"flavour": flavour})
    traced: list[int] = []
    step = replica.model.train_step
    replica.model.train_step = lambda data: [traced.append(1), step(data)][1]

    for number in (0, 1, 2):
        epoch(replica, batch, number, replica.state())

    assert len(traced) == 1
