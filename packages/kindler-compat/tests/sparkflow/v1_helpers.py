"""Helpers of programs for TensorFlow 1 that stand in a module of their own."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def perceptron(x: Any, units: int) -> Any:
    return tf.layers.dense(x, units, activation=tf.nn.sigmoid)
