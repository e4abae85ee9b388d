"""Orca's program for TensorFlow 2 on a DataFrame: `orca_keras.py MNIST_FOLDER` prints what came out, as JSON.

Between the lines of the guide stands only what it leaves to its reader: the model, and a frame of images.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import numpy as np
from tensorflow import keras

import kindler
from kindler import Epochs, Estimator

ROWS = 2000


def create_keras_lenet_model() -> Any:
    return keras.Sequential(
        [
            keras.layers.Input((28, 28, 1)),
            keras.layers.Conv2D(20, 5, activation="tanh", padding="valid"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2D(50, 5, activation="tanh", padding="valid"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(500, activation="tanh"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def model_creator(config: dict[str, Any]) -> Any:
    model = create_keras_lenet_model()
    model.compile(
        optimizer=keras.optimizers.RMSprop(), loss="sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def images(folder: str) -> tuple[np.ndarray, np.ndarray]:
    with gzip.open(Path(folder, "train-images-idx3-ubyte.gz")) as file:
        pixels = np.frombuffer(file.read(16 + ROWS * 784), np.uint8, offset=16)
    with gzip.open(Path(folder, "train-labels-idx1-ubyte.gz")) as file:
        labels = np.frombuffer(file.read(8 + ROWS), np.uint8, offset=8)
    return pixels.reshape(-1, 784).astype(np.float32) / 255, labels


if __name__ == "__main__":
    spark = kindler.init("local[2]")
    x, y = images(sys.argv[1])
    rows = [(pixels.tolist(), int(label)) for pixels, label in zip(x, y, strict=True)]
    df = spark.createDataFrame(rows, "image array<float>, label int")
    max_epoch, batch_size = 3, 100

    est = Estimator.from_keras(model=model_creator)
    stats = est.fit(
        data=df,
        epochs=Epochs(max_epoch, steps_per_epoch=ROWS // batch_size),
        batch_size=batch_size,
        feature_cols=["image"],
        label_cols=["label"],
    )
    predictions = est.predict(data=df, feature_cols=["image"])

    est.save("lenet.keras")
    scores = np.array([row.prediction for row in predictions.select("prediction").collect()])
    plain = keras.models.load_model("lenet.keras").predict(x.reshape(-1, 28, 28, 1), verbose=0)
    seen = {
        "loss": stats["loss"],
        "off by": float(np.abs(plain - scores).max()),
        "accuracy": float((scores.argmax(1) == y).mean()),
    }
    print()  # noqa: T201
    print(json.dumps(seen))  # noqa: T201
