"""TensorFlow 1 as programs of its time know it, on TensorFlow 2: `tf.placeholder`, `tf.layers`, `tf.losses`.

TensorFlow 2 has most of it as `tensorflow.compat.v1`. What moved to Keras 2 is found in `tf_keras`.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kindler.errors import MissingExtraError

__all__ = ["V1", "json_format", "speaking_v1", "tf"]

_IN_KERAS_2 = {"layers": "tf_keras.api._v1.keras.__internal__.legacy.layers", "keras": "tf_keras"}


class V1(types.ModuleType):
    """`tensorflow.compat.v1`, whose `layers` and `keras` work with any version of Keras beside it."""

    def __init__(self) -> None:
        super().__init__("tensorflow.compat.v1")

    def __getattr__(self, name: str) -> Any:
        if name in _IN_KERAS_2:
            try:
                return importlib.import_module(_IN_KERAS_2[name])
            except ModuleNotFoundError as exc:
                if exc.name != "tf_keras":
                    raise
                raise MissingExtraError(what=f"tf.{name}", package="tf_keras", extra="tf-keras") from exc
        return getattr(_compat(), name)


tf = V1()


@contextmanager
def speaking_v1(function: Callable[..., Any]) -> Iterator[None]:
    """Within the block, whatever a function and its module call TensorFlow is TensorFlow 1.

    So `import tensorflow as tf` at the top of a program written for TensorFlow 1 can stay.
    """
    inner = getattr(function, "__func__", getattr(function, "func", function))
    names = getattr(inner, "__globals__", {})
    found = {name: value for name, value in names.items() if _is_tensorflow(value)}
    cells = [cell for cell in getattr(inner, "__closure__", None) or () if _is_tensorflow(_content(cell))]
    contents = [cell.cell_contents for cell in cells]
    try:
        names.update(dict.fromkeys(found, tf))
        for cell in cells:
            cell.cell_contents = tf
        yield
    finally:
        names.update(found)
        for cell, content in zip(cells, contents, strict=True):
            cell.cell_contents = content


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _is_tensorflow(value: Any) -> bool:
    loaded = [sys.modules.get(name) for name in ("tensorflow", "tensorflow.compat.v1")]
    return isinstance(value, types.ModuleType) and any(value is module for module in loaded)


def _compat() -> Any:
    try:
        return importlib.import_module("tensorflow.compat.v1")
    except ModuleNotFoundError as exc:
        raise MissingExtraError(
            what="kindler.compat.sparkflow", package="tensorflow", extra="tensorflow"
        ) from exc


def json_format() -> Any:
    """What makes text of protobuf's messages, and messages of text."""
    return importlib.import_module("google.protobuf.json_format")
