"""What Orca's page leaves to its reader for TensorFlow 2; workers import it."""

from __future__ import annotations

from typing import Any

from tensorflow import keras

from tests.seeds.digits import digits
from tests.whole import WHOLE

__all__ = ["ENOUGH", "EPOCHS", "create_keras_lenet_model", "preprocess", "tfds"]

EPOCHS, ENOUGH = (2, 0.97) if WHOLE else (4, 0.7)


class tfds:
    """`tensorflow_datasets`, which would download: what the page loads with it."""

    @staticmethod
    def load(name: str, split: str) -> Any:
        import tensorflow as tf

        assert name == "mnist"
        images, labels = digits(split)
        return tf.data.Dataset.from_tensor_slices({"image": images[..., None], "label": labels})


def preprocess(row: dict[str, Any]) -> tuple[Any, Any]:
    import tensorflow as tf

    return tf.cast(row["image"], tf.float32) / 255.0, tf.cast(row["label"], tf.int32)


def create_keras_lenet_model() -> Any:
    return keras.Sequential(
        [
            keras.layers.Input((28, 28, 1)),
            keras.layers.Conv2D(20, 5, activation="tanh"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2D(50, 5, activation="tanh"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(100, activation="tanh"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
