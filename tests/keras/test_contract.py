"""Keras keeps the contract of frameworks, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flavour import KERAS, PRELOAD

from kindler.errors import ConfigError
from kindler.frameworks.registry import FRAMEWORKS
from kindler.testing.replicas import ReplicaCase, ReplicaContract, cut

KerasReplica = FRAMEWORKS.load("keras")


def _batches() -> list[Any]:
    random = np.random.default_rng(0)
    return [
        ((random.normal(size=(12, 4)).astype(np.float32),), (random.integers(0, 3, 12),)) for _ in range(3)
    ]


def _compiled(model: Any) -> Any:
    model.compile(
        optimizer=KERAS.optimizers.Adam(0.05),
        loss=KERAS.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def _classifier() -> Any:
    layers = [
        KERAS.layers.Dense(6, activation="tanh", kernel_regularizer=KERAS.regularizers.L2(0.01)),
        KERAS.layers.Dense(3),
    ]
    return _compiled(KERAS.Sequential([KERAS.layers.Input((4,)), *layers]))


class TestKeras(ReplicaContract):
    framework = "keras"
    preload = PRELOAD

    @pytest.fixture
    def case(self) -> ReplicaCase:
        return ReplicaCase(spec=KerasReplica.make_spec(model=_classifier), batches=_batches())


class OwnStep(KERAS.Model):
    """A model that trains itself in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.out = KERAS.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.out(x)

    def train_step(self, *args: Any) -> Any:
        return super().train_step(*args)


def test_the_gradients_of_a_train_step_of_the_users_own_are_refused() -> None:
    replica = KerasReplica(KerasReplica.make_spec(model=lambda: _compiled(OwnStep())))
    features, labels = _batches()[0]
    replica.arrange(("x",), ("y",))
    replica.build(features, labels)

    with pytest.raises(ConfigError, match="OwnStep has its own train_step"):
        replica.gradients(cut(features, labels, (12,)))
