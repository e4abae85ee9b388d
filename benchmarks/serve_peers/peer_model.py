"""The model as the peers call it: a file in, a function of an array of rows out. Needs nothing of Kindler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def load(path: str) -> Callable[[Any], Any]:
    """A scikit-learn model (.joblib), or a Keras model on TensorFlow (.keras) as one compiled function."""
    if path.endswith(".joblib"):
        import joblib

        predict: Callable[[Any], Any] = joblib.load(path).predict
        return predict
    import keras
    import tensorflow as tf

    model = keras.saving.load_model(path)
    spec = tf.TensorSpec((None, *model.input_shape[1:]), tf.float32)
    compiled = tf.function(lambda x: model(x, training=False), input_signature=[spec], autograph=False)
    return lambda rows: compiled(tf.constant(rows, tf.float32)).numpy()
