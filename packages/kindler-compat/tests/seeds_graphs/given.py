"""What the pages leave to their readers for TensorFlow 1; workers and executors import it."""

from __future__ import annotations

from typing import Any

import numpy as np

from kindler.compat import tensorflow as tf
from tests.seeds.digits import TEST_ROWS, TRAIN_ROWS, digits

__all__ = [
    "accuracy", "create_keras_lenet_model", "decode_to_ndarrays", "file_list", "get_data_rdd", "images",
    "lenet", "preprocess", "read_image_and_label", "tfds",
]  # fmt: skip


def images(split: str) -> tuple[Any, Any]:
    """Digits between 0 and 1, with an axis of channels, and their labels."""
    x, y = digits(split)
    return x[..., None].astype(np.float32) / 255, y.astype(np.int32)


def file_list(split: str) -> list[tuple[str, int]]:
    """The pictures of a split, each as if it were a file."""
    return [(split, number) for number in range(TRAIN_ROWS if split == "train" else TEST_ROWS)]


def read_image_and_label(file: tuple[str, int]) -> tuple[Any, Any]:
    split, number = file
    pictures, labels = digits(split)
    return pictures[number], labels[number]


def decode_to_ndarrays(image_label: tuple[Any, Any]) -> list[Any]:
    image, label = image_label
    return [image[..., None].astype(np.float32) / 255, np.array(label, np.int32)]


def get_data_rdd(split: str, sc: Any) -> Any:
    files = file_list("train" if split == "train" else "test")
    rows = sc.parallelize(files, 2).map(lambda file: decode_to_ndarrays(read_image_and_label(file)))
    return rows.map(lambda row: row[0]) if split == "test" else rows


class tfds:
    """`tensorflow_datasets`, which would download: what the page loads with it."""

    @staticmethod
    def load(name: str, split: str) -> Any:
        assert name == "mnist"
        pictures, labels = digits(split)
        return tf.data.Dataset.from_tensor_slices({"image": pictures[..., None], "label": labels})


def preprocess(row: dict[str, Any]) -> tuple[Any, Any]:
    return tf.cast(row["image"], tf.float32) / 255.0, tf.cast(row["label"], tf.int32)


def lenet(pictures: Any) -> Any:
    net = tf.layers.conv2d(pictures, 20, 5, activation=tf.nn.tanh)
    net = tf.layers.max_pooling2d(net, 2, 2)
    net = tf.layers.conv2d(net, 50, 5, activation=tf.nn.tanh)
    net = tf.layers.max_pooling2d(net, 2, 2)
    return tf.layers.dense(tf.layers.flatten(net), 10)


def accuracy(logits: Any, labels: Any) -> Any:
    return tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1, output_type=tf.int32), labels), tf.float32))


def create_keras_lenet_model() -> Any:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Conv2D(20, 5, activation="tanh", input_shape=(28, 28, 1)),
            layers.MaxPooling2D(2),
            layers.Conv2D(50, 5, activation="tanh"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(10, activation="softmax"),
        ]
    )
