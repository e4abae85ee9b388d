"""What TensorFlowOnSpark offers for several versions of TensorFlow."""

from __future__ import annotations

import tempfile
from typing import Any

import tensorflow as tf

from kindler.compat.tensorflowonspark.gpu_info import is_gpu_available

__all__ = ["disable_auto_shard", "export_saved_model", "is_gpu_available"]


def export_saved_model(model: Any, export_dir: str, is_chief: bool = False) -> None:
    """Save a model; nodes that are not the chief save to a temporary folder, because all must save."""
    if is_chief:
        tf.saved_model.save(model, export_dir)
        return
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(model, folder)


def disable_auto_shard(options: Any) -> None:
    """Have `tf.data` leave the data as the program divides it."""
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
