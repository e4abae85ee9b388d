"""Orca's Keras programs on XShards: prints what came out, as JSON.

Between the lines of the guide stands only what it leaves to its reader: the model, the data, the session.
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import numpy as np
from sklearn.datasets import load_digits
from tensorflow import keras

import kindler
from kindler import Epochs, Estimator, XShards

max_epoch, batch_size = 8, 32


def create_keras_lenet_model() -> Any:
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu", padding="same"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def model_creator(config: dict[str, Any]) -> Any:
    model = create_keras_lenet_model()
    model.compile(
        optimizer=keras.optimizers.RMSprop(), loss="sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def with_a_model(xshards: XShards) -> tuple[Any, XShards, Any]:
    model = create_keras_lenet_model()
    model.compile(
        optimizer=keras.optimizers.RMSprop(), loss="sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    est = Estimator.from_keras(model=model)  # was: keras_model=model

    stats = est.fit(data=xshards, batch_size=batch_size, epochs=max_epoch)
    predictions = est.predict(data=xshards)
    return stats, predictions, est


def with_a_creator(xshards: XShards) -> tuple[Any, XShards, Any]:
    est = Estimator.from_keras(model=model_creator)

    total_size = len(xshards)
    stats = est.fit(
        data=xshards,
        epochs=Epochs(max_epoch, steps_per_epoch=-(-total_size // batch_size)),
        batch_size=batch_size,
    )
    predictions = est.predict(data=xshards)
    return stats, predictions, est


def main() -> None:
    kindler.init("local[2]")
    images, labels = load_digits(return_X_y=True)
    xshards = XShards.partition({"x": (images / 16).reshape(-1, 8, 8, 1), "y": labels})
    seen: dict[str, Any] = {"engine": xshards.engine, "num_samples": [], "accuracy": [], "shapes": []}
    for program in (with_a_model, with_a_creator):
        stats, predictions, est = program(xshards)
        scores = np.concatenate([shard["prediction"] for shard in predictions.collect()])
        assert est.evaluate(data=xshards)["num_samples"] == len(scores)
        seen["num_samples"].append(stats["num_samples"])
        seen["shapes"].append([scores.shape])
        seen["accuracy"].append(float((scores.argmax(1) == labels).mean()))
    print()  # noqa: T201
    print(json.dumps(seen))  # noqa: T201


if __name__ == "__main__":
    main()
