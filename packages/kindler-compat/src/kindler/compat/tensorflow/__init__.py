"""TensorFlow 1 as its programs know it: `from kindler.compat import tensorflow as tf`.

`tensorflow.compat.v1`, with what TensorFlow 2 took out of it: `tf.layers` and `tf.keras` (of `tf_keras`),
`tf.contrib.slim` (of `tf_slim`), `tf.estimator.ModeKeys` and `EstimatorSpec`. Modules of Keras are below
it: `from kindler.compat.tensorflow.keras.layers import *`. Importing this module turns the behaviour of
TensorFlow 2 off for the whole process, eager execution included.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kindler.compat.bigdl.alias import alias
from kindler.errors import MissingExtraError

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # what `tensorflow.compat.v1.layers` and slim go by

import tensorflow.compat.v1 as _v1

_v1.disable_v2_behavior()
alias(f"{__name__}.keras", "tf_keras.api._v1.keras")


def _slim() -> Any:
    try:
        return importlib.import_module("tf_slim")
    except ModuleNotFoundError as exc:
        raise MissingExtraError(what="tf.contrib.slim", package="tf_slim", extra="tensorflow1") from exc


def _keras() -> Any:
    try:
        return importlib.import_module("tf_keras.api._v1.keras")
    except ModuleNotFoundError as exc:
        raise MissingExtraError(
            what="tf.keras and tf.layers", package="tf_keras", extra="tensorflow1"
        ) from exc


class _Contrib:
    """`tf.contrib`: slim, and the layers that are slim's."""

    @property
    def slim(self) -> Any:
        return _slim()

    @property
    def layers(self) -> Any:
        return _slim().layers


def _estimator() -> Any:
    from kindler.compat.estimators import EstimatorSpec, ModeKeys
    from kindler.compat.zoo.tfpark.estimator import Estimator

    return SimpleNamespace(Estimator=Estimator, EstimatorSpec=EstimatorSpec, ModeKeys=ModeKeys)


_OWN: dict[str, Callable[[], Any]] = {
    "contrib": _Contrib,
    "estimator": _estimator,
    "keras": _keras,
    "layers": lambda: _keras().__internal__.legacy.layers,
}


def __getattr__(name: str) -> Any:
    made = _OWN[name]() if name in _OWN else getattr(_v1, name)
    globals()[name] = made
    return made


def __dir__() -> list[str]:
    return sorted({*dir(_v1), *_OWN})
