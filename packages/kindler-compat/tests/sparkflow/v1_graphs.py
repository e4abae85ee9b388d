"""Functions that build graphs, as programs for TensorFlow 1 have them: `tf` is what they imported."""

from __future__ import annotations

from typing import Any

import tensorflow

tf: Any = tensorflow  # TensorFlow 2 has no placeholders; `build_graph` finds those of TensorFlow 1


def clouds() -> Any:
    x = tf.placeholder(tf.float32, shape=[None, 10], name="x")
    y = tf.placeholder(tf.float32, shape=[None, 1], name="y")
    layer1 = tf.layers.dense(x, 12, activation=tf.nn.relu)
    layer2 = tf.layers.dense(layer1, 7, activation=tf.nn.relu)
    out = tf.layers.dense(layer2, 1, name="outer", activation=tf.nn.sigmoid)
    return tf.losses.mean_squared_error(y, out)


def xor() -> Any:
    x = tf.placeholder(tf.float32, shape=[None, 2], name="x")
    y = tf.placeholder(tf.float32, shape=[None, 1], name="y")
    layer1 = tf.layers.dense(x, 12, activation=tf.nn.tanh)
    out = tf.layers.dense(layer1, 1, name="outer", activation=tf.nn.sigmoid)
    return tf.losses.mean_squared_error(y, out)


def autoencoder() -> Any:
    x = tf.placeholder(tf.float32, shape=[None, 10], name="x")
    hidden = tf.layers.dense(x, 4, activation=tf.nn.tanh)
    out = tf.layers.dense(hidden, 10, name="out")
    return tf.losses.mean_squared_error(x, out)


def returned() -> Any:
    """A weighted sum, a loss that `tf.losses` knows nothing of, and outputs with dropout."""
    x = tf.placeholder(tf.float32, shape=[None, 2], name="x")
    y = tf.placeholder(tf.float32, shape=[None, 1], name="y")
    drop = tf.placeholder_with_default(0.5, shape=[], name="drop")
    keep = tf.placeholder_with_default(0.5, shape=[], name="keep")
    w = tf.get_variable("w", initializer=[[1.0], [2.0]])
    tf.matmul(tf.nn.dropout(x, rate=drop), w, name="dropped")
    tf.matmul(tf.nn.dropout(x, keep_prob=keep), w, name="kept")
    out = tf.matmul(x, w, name="out")
    return tf.square(out - y)


def normalised() -> Any:
    x = tf.placeholder(tf.float32, shape=[None, 2], name="x")
    y = tf.placeholder(tf.float32, shape=[None, 1], name="y")
    mean = tf.get_variable("mean", initializer=[0.0, 0.0], trainable=False)
    update = tf.assign(mean, 0.5 * mean + 0.5 * tf.reduce_mean(x, axis=0))
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    out = tf.layers.dense(x - mean, 1, name="out")
    return tf.losses.mean_squared_error(y, out)
