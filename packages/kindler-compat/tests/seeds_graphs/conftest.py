"""TensorFlow 1 for all programs of this folder: in their process eager execution is off."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from kindler.compat import tensorflow as tf
from tests.seeds.conftest import _warm, folder, spark
from tests.warm_daemon import PRELOAD

__all__ = ["_warm", "folder", "spark"]

os.environ.setdefault(PRELOAD, "tensorflow")


@pytest.fixture(autouse=True)
def _graph() -> Iterator[Any]:
    """A graph of the program's own."""
    tf.keras.backend.clear_session()
    with tf.Graph().as_default() as made:
        yield made
