"""The TFRecord format of tf.train.Example, without TensorFlow; the public API is `kindler.tfrecord`."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

_MOVED = ("infer_schema", "iter_batches", "read", "scan", "write")


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"use kindler.tfrecord.{name}.", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module("kindler.tfrecord"), name)
