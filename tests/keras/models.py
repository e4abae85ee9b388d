"""Models of many kinds; workers import their classes from here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import problems
from flavour import FLAVOUR, KERAS
from watchers import WORKER


class Scale(KERAS.layers.Layer):
    """A factor for each feature."""

    def __init__(self, start: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.start = start

    def build(self, shape: Any) -> None:
        constant = KERAS.initializers.Constant(self.start)
        self.factor = self.add_weight(name="factor", shape=(shape[-1],), initializer=constant)
        super().build(shape)

    def call(self, x: Any) -> Any:
        return x * self.factor

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "start": self.start}


class Subclassed(KERAS.Model):
    """A model that is built when it first sees a batch."""

    def __init__(self, units: int = 5, **options: Any) -> None:
        super().__init__(**options)
        self.units = units
        self.scale = Scale(0.5)
        self.hidden = KERAS.layers.Dense(units, activation="tanh")
        self.out = KERAS.layers.Dense(1, activation="sigmoid")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.hidden(self.scale(x)))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


class ByName(KERAS.Model):
    """A model whose inputs come as a dict."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.left, self.right = KERAS.layers.Dense(3), KERAS.layers.Dense(3)
        self.out = KERAS.layers.Dense(1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.out(self.left(inputs["a"]) + self.right(inputs["b"]))


def by_name(config: Mapping[str, Any]) -> Any:
    model = ByName()
    model.compile(optimizer=KERAS.optimizers.SGD(0.05), loss="mse")
    return model


class OwnStep(KERAS.Model):
    """A train step of the user's own: twice the loss."""

    if FLAVOUR == "jax":

        def train_step(self, state: Any, data: Any) -> Any:
            import jax

            trainable, others, optimizer, metrics = state
            x, y = data[:2]

            def twice(trainable: Any, others: Any) -> Any:
                predicted, others = self.stateless_call(trainable, others, x, training=True)
                return 2 * self.compute_loss(x, y, predicted), others

            (loss, others), grads = jax.value_and_grad(twice, has_aux=True)(trainable, others)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
            return {"twice": loss}, (trainable, others, optimizer, metrics)

    elif FLAVOUR == "torch":

        def train_step(self, data: Any) -> Any:
            import torch

            x, y = data[:2]
            self.zero_grad()
            loss = 2 * self.compute_loss(x, y, self(x, training=True))
            loss.backward()
            weights = list(self.trainable_weights)
            with torch.no_grad():
                self.optimizer.apply([weight.value.grad for weight in weights], weights)
            return {"twice": loss.detach()}

    else:

        def train_step(self, data: Any) -> Any:
            import tensorflow as tf

            x, y = data[:2]
            with tf.GradientTape() as tape:
                loss = 2 * self.compute_loss(x, y, self(x, training=True))
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"twice": loss}


def own_step(config: Mapping[str, Any]) -> Any:
    inputs = KERAS.Input((problems.WIDTH,))
    model = OwnStep(inputs, KERAS.layers.Dense(1, activation="sigmoid")(inputs))
    model.compile(optimizer=KERAS.optimizers.SGD(0.05), loss="binary_crossentropy")
    return model


def two_by_two(config: Mapping[str, Any]) -> Any:
    """Inputs "a" and "b", outputs "sum" and "sign"; `config["order"]` is that of the inputs."""
    inputs = {"a": KERAS.Input((2,), name="a"), "b": KERAS.Input((3,), name="b")}
    left = KERAS.layers.Dense(4, name="left", kernel_initializer="ones")(inputs["a"])
    right = KERAS.layers.Dense(4, name="right", kernel_initializer="ones")(inputs["b"])
    joined = KERAS.layers.Concatenate()([left, right])
    outputs = [
        KERAS.layers.Dense(1, name="sum", kernel_initializer="zeros")(joined),
        KERAS.layers.Dense(2, name="sign", activation="softmax", kernel_initializer="zeros")(joined),
    ]
    model = KERAS.Model([inputs[name] for name in config["order"]], outputs)
    losses = {"sum": "mse", "sign": "sparse_categorical_crossentropy"}
    model.compile(
        optimizer=KERAS.optimizers.SGD(0.05),
        loss=losses if config.get("named", True) else list(losses.values()),
        loss_weights={"sum": 1.0, "sign": 0.5} if config.get("named", True) else [1.0, 0.5],
    )
    return model


def words(config: Mapping[str, Any]) -> Any:
    """Embeddings, a penalty and a falling rate."""
    inputs = KERAS.Input((4,), dtype="int32")
    hidden = KERAS.layers.Embedding(20, 3)(inputs)
    hidden = KERAS.layers.Flatten()(hidden)
    hidden = KERAS.layers.Dense(4, activation="relu", kernel_regularizer="l2")(hidden)
    model = KERAS.Model(inputs, KERAS.layers.Dense(1)(hidden))
    rate = KERAS.optimizers.schedules.ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5)
    model.compile(optimizer=KERAS.optimizers.SGD(rate, momentum=0.9), loss="mse")
    return model


def mixed(config: Mapping[str, Any]) -> Any:
    """Computes in 16 bits; not compiled."""
    policy = KERAS.mixed_precision if FLAVOUR == "tf_keras" else KERAS.config
    setter = getattr(policy, "set_global_policy", None) or policy.set_dtype_policy
    setter(config["policy"])
    try:
        inputs = KERAS.Input((problems.WIDTH,))
        hidden = KERAS.layers.Dense(8, activation="tanh")(inputs)
        model = KERAS.Model(inputs, KERAS.layers.Dense(1, activation="sigmoid", dtype="float32")(hidden))
        if config.get("compiled"):
            model.compile(**mixed_arguments(config))
        return model
    finally:
        setter("float32")


def mixed_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"optimizer": KERAS.optimizers.SGD(0.05), "loss": "binary_crossentropy", "metrics": ["accuracy"]}


class FailsOnRankOne(KERAS.layers.Layer):
    """A layer with a mistake that only rank 1 makes."""

    def call(self, x: Any) -> Any:
        if WORKER["rank"] == 1:
            raise NotImplementedError("a layer's own mistake")
        return x


def loss_that_fails_on_rank_one(y: Any, predicted: Any) -> Any:
    if WORKER["rank"] == 1:
        raise LookupError("a loss's own mistake")
    return KERAS.losses.binary_crossentropy(y, predicted)


def failing(config: Mapping[str, Any]) -> Any:
    inputs = KERAS.Input((problems.WIDTH,))
    outputs = KERAS.layers.Dense(1, activation="sigmoid")(inputs)
    if config["where"] == "layer":
        outputs = FailsOnRankOne()(outputs)
    model = KERAS.Model(inputs, outputs)
    loss = loss_that_fails_on_rank_one if config["where"] == "loss" else "binary_crossentropy"
    model.compile(optimizer="sgd", loss=loss)
    return model
