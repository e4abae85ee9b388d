"""Functions that the tests of the runtime store; workers import them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.whole import WHOLE

SHAPE = (192, 192, 3) if WHOLE else (96, 96, 3)
IMAGES = np.random.default_rng(0).random((4, *SHAPE), np.float32)


def flowers(batch_size: int = 2) -> Any:
    """A virtual dataset: images as a `tf.data.Dataset`."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(IMAGES).batch(batch_size)


def classify(data: Any, method: str, **options: Any) -> Any:
    """A model that is a function: it predicts with the model that is stored."""
    from kindler import om

    assert method == "predict"
    return om.models.get("tfkeras-flower").predict(data, verbose=0)
