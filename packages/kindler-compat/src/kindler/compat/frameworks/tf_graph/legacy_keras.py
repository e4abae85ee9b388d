"""`tf.layers`, `tf.keras` and `tf.nn.rnn_cell` of TensorFlow 1, which Keras 3 does not have.

TensorFlow finds them in `tf_keras` if TF_USE_LEGACY_KERAS=1 is set when they are first used, and otherwise
raises. Programs of TensorFlow 1 have no other use for them, so they are put in their place.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any

from kindler.errors import MissingExtraError

_KERAS_1 = "tf_keras.api._v1.keras"


class LegacyModule(ModuleType):
    """A module of `tf_keras`, imported when something of it is used."""

    def __init__(self, name: str, target: str = _KERAS_1) -> None:
        super().__init__(name)
        self.__dict__["_target"] = target

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":  # which would make a package of it
            raise AttributeError(name)
        try:
            module = importlib.import_module(self.__dict__["_target"])
        except ModuleNotFoundError as exc:
            if exc.name != "tf_keras":
                raise
            raise MissingExtraError(what=self.__name__, package="tf_keras", extra="tf-keras") from exc
        return getattr(module, name)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(self.__dict__["_target"]))


def restore_legacy_keras() -> None:
    """Let `tensorflow.compat.v1` have them again, where `tf_keras` is installed and nobody has chosen."""
    if "TF_USE_LEGACY_KERAS" in os.environ or importlib.util.find_spec("tf_keras") is None:
        return
    import tensorflow.compat.v1 as tf

    if not isinstance(tf.layers, LegacyModule):
        tf.layers = LegacyModule("tf.layers", f"{_KERAS_1}.__internal__.legacy.layers")
        tf.nn.rnn_cell = LegacyModule("tf.nn.rnn_cell", f"{_KERAS_1}.__internal__.legacy.rnn_cell")
        tf.keras = LegacyModule("tf.keras")
