"""The format of TFRecord files of tf.train.Example, without TensorFlow; the door is `kindler.tfrecord`.

How records lie in a file is in `framing`, how an Example is read and written for many rows at once in
`examples`, `decode` and `encode`.
"""

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
