"""MNIST with Keras: `mnist_keras.py BACKEND MASTER MNIST_FOLDER WORK_FOLDER small|whole` prints accuracies.

Small is a fifth of the rows, in two epochs.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import kindler
from kindler import Columns


def dense(config: dict[str, Any]) -> Any:
    """TFPark's model."""
    import keras

    layers = [
        keras.layers.Input((28, 28, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
    return compiled(keras, layers)


def lenet(config: dict[str, Any]) -> Any:
    """Orca's model."""
    import keras

    layers = [
        keras.layers.Input((28, 28, 1)),
        keras.layers.Conv2D(8, 5, activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Conv2D(16, 5, activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
    return compiled(keras, layers)


def compiled(keras: Any, layers: list[Any]) -> Any:
    model = keras.Sequential(layers)
    model.compile(
        optimizer=keras.optimizers.RMSprop(), loss="sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def read(folder: Path, part: str, share: int) -> pa.Table:
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784)[::share]
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)[::share]
    pixels = pa.array((images / np.float32(255)).reshape(-1))
    lists = pa.FixedSizeListArray.from_arrays(pixels, 784).cast(pa.list_(pa.float32()))
    return pa.table({"image": lists, "label": labels.astype(np.int64)})


def falling(epoch: int, rate: float) -> float:
    """A learning rate that starts high and falls: 64 units end at 0.97 with RMSprop's own."""
    return 5e-3 * 0.75**epoch


def main(backend: str, master: str, mnist: str, work: str, size: str) -> None:
    os.environ["KERAS_BACKEND"] = backend
    import keras

    share = 1 if size == "whole" else 5
    schedule = [keras.callbacks.LearningRateScheduler(falling)]
    for part in ("train", "t10k"):
        pq.write_table(read(Path(mnist), part, share), Path(work) / f"{part}.parquet", row_group_size=6000)
    spark = kindler.init(master)
    train, test = (spark.read.parquet(f"{work}/{part}.parquet") for part in ("train", "t10k"))
    columns = {"feature_cols": ["image"], "label_cols": ["label"]}
    reached = {}
    for creator, whole, ingest, callbacks in ((dense, 11, "inline", schedule), (lenet, 4, "direct", [])):
        epochs = whole if size == "whole" else 2
        est = kindler.Estimator.from_keras(model=creator, workers=2)
        history = est.fit(
            train,
            epochs=epochs,
            batch_size=128,
            verbose=0,
            columns=Columns(ingest=ingest),
            callbacks=callbacks,
            **columns,
        )
        assert history["num_samples"] == [60_000 // share] * epochs, history
        figures = est.evaluate(test, verbose=0, **columns)
        assert figures["num_samples"] == 10_000 // share, figures
        reached[creator.__name__] = figures["accuracy"]
    sys.stdout.write(json.dumps(reached))


if __name__ == "__main__":
    main(*sys.argv[1:])
