"""Models whose loss compares rows with one another; workers import them from here."""

from __future__ import annotations

from typing import Any

import own_steps
from flavour import FLAVOUR, KERAS

import kindler

layers = KERAS.layers
WIDTH = 6


def contrast(outputs: Any) -> Any:
    """The mean over rows of how much a row is like others rather than like itself."""
    if FLAVOUR == "tf_keras":
        import tensorflow as tf

        scores = tf.tanh(outputs[:, :2]) @ tf.transpose(tf.tanh(outputs[:, 2:]))
        return tf.reduce_mean(tf.reduce_logsumexp(scores, axis=1) - tf.linalg.diag_part(scores))
    ops = KERAS.ops
    scores = ops.matmul(ops.tanh(outputs[:, :2]), ops.transpose(ops.tanh(outputs[:, 2:])))
    return ops.mean(ops.logsumexp(scores, axis=1) - ops.diagonal(scores))


def gathers(target: Any, outputs: Any) -> Any:
    return contrast(kindler.all_gather(outputs))


def compares(target: Any, outputs: Any) -> Any:
    return contrast(outputs)


def row_by_row(target: Any, outputs: Any) -> Any:
    return (outputs[:, 0] - target[:, 0]) ** 2


class Steps(KERAS.Model):
    """A train step of its own, which gathers or does not."""

    gathers = True

    def train_step(self, data: Any) -> Any:
        inputs, _ = data

        def loss() -> Any:
            outputs = self(inputs, training=True)
            return contrast(kindler.all_gather(outputs) if self.gathers else outputs)

        value, grads = own_steps.gradients(self, loss, self.trainable_variables)
        own_steps.apply(self.optimizer, grads, self.trainable_variables)
        return {"loss": value}


class Compares(Steps):
    gathers = False


class Means(Steps):
    def train_step(self, data: Any) -> Any:
        inputs, _ = data
        value, grads = own_steps.gradients(
            self, lambda: own_steps.mean_square(self(inputs, training=True)), self.trainable_variables
        )
        own_steps.apply(self.optimizer, grads, self.trainable_variables)
        return {"loss": value}


class Adds(layers.Layer):  # type: ignore[misc]
    """Adds to the loss something of all rows, or the mean of something of each row."""

    def __init__(self, *, of_all: bool) -> None:
        super().__init__()
        self.of_all = of_all

    def call(self, outputs: Any) -> Any:
        self.add_loss(contrast(outputs) if self.of_all else own_steps.mean_square(outputs))
        return outputs


LOSSES = {"gathers": gathers, "compares": compares, "row_by_row": row_by_row}
STEPS = {"steps": Steps, "compares_in_steps": Compares, "means_in_steps": Means}


def model(config: Any) -> Any:
    inputs = layers.Input((WIDTH,))
    inner = layers.Dense(8, activation="tanh")(inputs)
    if config.get("restless"):
        inner = layers.Dropout(0.3)(layers.BatchNormalization()(inner))
    outputs, loss = layers.Dense(4)(inner), LOSSES.get(config["kind"])
    if config["kind"] in ("adds_of_all", "adds_means"):
        outputs, loss = Adds(of_all=config["kind"] == "adds_of_all")(outputs), "mse"
    made = STEPS.get(config["kind"], KERAS.Model)(inputs, outputs)
    made.compile(optimizer=KERAS.optimizers.SGD(0.1), loss=loss)
    return made
