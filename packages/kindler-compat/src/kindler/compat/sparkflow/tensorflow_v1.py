"""TensorFlow 1 as programs of its time know it, on TensorFlow 2: `tf.placeholder`, `tf.layers`, `tf.losses`.

TensorFlow 2 has most of it as `tensorflow.compat.v1`. What moved to Keras 2 is found in `tf_keras`.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kindler.compat.frameworks.tf_graph.legacy_keras import LegacyModule, restore_legacy_keras
from kindler.errors import MissingExtraError

_IN_KERAS_2 = {
    "layers": LegacyModule("tf.layers", "tf_keras.api._v1.keras.__internal__.legacy.layers"),
    "keras": LegacyModule("tf.keras", "tf_keras"),
}


class V1(types.ModuleType):
    """`tensorflow.compat.v1`, whose `layers` and `keras` work with any version of Keras beside it."""

    def __init__(self) -> None:
        super().__init__("tensorflow.compat.v1")

    def __getattr__(self, name: str) -> Any:
        return _IN_KERAS_2[name] if name in _IN_KERAS_2 else getattr(_compat(), name)


tf = V1()

_lock = threading.Lock()
_speaking = 0
_before: dict[str, Any] = {}


@contextmanager
def speaking_v1() -> Iterator[None]:
    """Within the block the module `tensorflow` is TensorFlow 1, wherever it is or was imported.

    So `import tensorflow as tf` can stay in a program written for TensorFlow 1, at its top, in a function,
    and in other modules.
    """
    global _speaking
    module = importlib.import_module("tensorflow")
    with _lock:
        if not _speaking:
            _put_v1_in_place(module)
        _speaking += 1
    try:
        yield
    finally:
        with _lock:
            _speaking -= 1
            if not _speaking:
                _put_v2_back(module)


def _put_v1_in_place(module: types.ModuleType) -> None:
    restore_legacy_keras()
    if importlib.util.find_spec("tf_keras") is not None:
        importlib.import_module("tf_keras")  # which must not find TensorFlow 1 there when it is first used
    for name in _names():
        if name in vars(module):
            _before[name] = vars(module)[name]
        setattr(module, name, getattr(tf, name))


def _put_v2_back(module: types.ModuleType) -> None:
    for name in _names():
        if name in _before:
            setattr(module, name, _before[name])
        else:
            delattr(module, name)
    _before.clear()


def _names() -> set[str]:
    return {name for name in dir(_compat()) if not name.startswith("_")} - {"compat"}


def _compat() -> Any:
    try:
        return importlib.import_module("tensorflow.compat.v1")
    except ModuleNotFoundError as exc:
        raise MissingExtraError(
            what="kindler.compat.sparkflow", package="tensorflow", extra="tensorflow"
        ) from exc


def json_format() -> Any:
    return importlib.import_module("google.protobuf.json_format")
