"""Models with a train step of the user's own, as Keras's guides write them; workers import them from here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import problems
from flavour import FLAVOUR, KERAS

layers = KERAS.layers
TENSORFLOW = FLAVOUR in ("tensorflow", "tf_keras")


def mean_square(value: Any) -> Any:
    if TENSORFLOW:
        import tensorflow as tf

        return tf.reduce_mean(tf.square(value))
    return KERAS.ops.mean(KERAS.ops.square(value))


def gradients(model: Any, loss_of: Any, variables: Any) -> tuple[Any, Any]:
    """A loss and its gradients, on TensorFlow and PyTorch."""
    if TENSORFLOW:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_of()
        return loss, tape.gradient(loss, variables)
    model.zero_grad()
    loss = loss_of()
    loss.backward()
    return loss.detach(), [variable.value.grad for variable in variables]


def apply(optimizer: Any, grads: Any, variables: Any) -> None:
    if TENSORFLOW:
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return
    import torch

    with torch.no_grad():
        optimizer.apply(grads, variables)


class Coder(KERAS.Model):
    """An autoencoder: no labels, no loss in `compile`, a metric of its own, and made by its first batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.encoder = layers.Dense(3, activation="tanh")
        self.decoder = layers.Dense(problems.WIDTH)
        self.tracker = KERAS.metrics.Mean(name=self.named)

    named = "loss"

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def call(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))

    if FLAVOUR == "jax":

        def train_step(self, state: Any, data: Any) -> Any:
            import jax

            trainable, others, optimizer, metrics = state

            def loss_of(trainable: Any, others: Any) -> Any:
                made, others = self.stateless_call(trainable, others, data)
                return mean_square(made - data), others

            (loss, others), grads = jax.value_and_grad(loss_of, has_aux=True)(trainable, others)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
            metrics = self.tracker.stateless_update_state(metrics, loss)
            told = self.tracker.stateless_result(metrics)
            return {self.named: told}, (trainable, others, optimizer, metrics)

    else:

        def train_step(self, data: Any) -> Any:
            weights = self.trainable_variables
            loss, grads = gradients(self, lambda: mean_square(self(data) - data), weights)
            apply(self.optimizer, grads, weights)
            self.tracker.update_state(loss)
            return {self.named: self.tracker.result()}


class Renamed(Coder):
    """Calls its loss something else."""

    named = "error"


def coder(config: Mapping[str, Any]) -> Any:
    model = {"loss": Coder, "error": Renamed}[config.get("named", "loss")]()
    model.compile(optimizer=KERAS.optimizers.SGD(0.2, momentum=0.5))
    return model


class Game(KERAS.Model):
    """Two networks with an optimizer each, given to a `compile` of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.generator = layers.Dense(problems.WIDTH)
        self.critic = layers.Dense(1)

    def compile(self, *, generator_optimizer: Any, critic_optimizer: Any) -> None:  # type: ignore[override]
        super().compile()
        self.generator_optimizer, self.critic_optimizer = generator_optimizer, critic_optimizer

    def call(self, x: Any) -> Any:
        return self.critic(self.generator(x))

    def train_step(self, data: Any) -> Any:
        real = data[0] if isinstance(data, tuple) else data
        weights = self.critic.trainable_variables
        loss, grads = gradients(
            self,
            lambda: mean_square(self.critic(real) - 1.0) + mean_square(self.critic(self.generator(-real))),
            weights,
        )
        apply(self.critic_optimizer, grads, weights)
        weights = self.generator.trainable_variables
        other, grads = gradients(self, lambda: mean_square(self.critic(self.generator(-real)) - 1.0), weights)
        apply(self.generator_optimizer, grads, weights)
        return {"critic_loss": loss, "generator_loss": other}


def game(config: Mapping[str, Any]) -> Any:
    model = Game()
    model.compile(
        generator_optimizer=KERAS.optimizers.SGD(0.05),
        critic_optimizer=KERAS.optimizers.SGD(0.1, momentum=0.9),
    )
    return model
