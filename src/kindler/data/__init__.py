"""Turns whatever the user passes in into each worker's batches of numpy arrays, by way of Arrow."""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name == "images":  # a user's module, which needs Pillow: found on first use
        return importlib.import_module("kindler.data.images")
    raise AttributeError(f"module 'kindler.data' has no attribute {name!r}")
