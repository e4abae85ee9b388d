"""TensorFlow 1 for all tests of this process: graphs, sessions, and the layers of Keras 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from kindler.compat import tensorflow as tf
from tests.checkout import PYTHONPATH
from tests.warm import _warm
from tests.warm_daemon import CONF, PRELOAD

os.environ.setdefault(PRELOAD, "tensorflow")

__all__ = ["_warm"]


@pytest.fixture
def graph() -> Iterator[Any]:
    """A graph of the test's own."""
    tf.keras.backend.clear_session()
    with tf.Graph().as_default() as made:
        yield made


@pytest.fixture(scope="session")
def rows() -> tuple[Any, Any]:
    """96 rows of 6 numbers, and whether their sum is large."""
    x = np.random.default_rng(0).uniform(size=(96, 6)).astype("float32")
    return x, (x.sum(axis=1) > 3).astype("int32")


@pytest.fixture(scope="session")
def sc() -> Iterator[Any]:
    """A Spark context, for test_spark_*.py, which come last: with it, everything runs on Spark."""
    import kindler
    from kindler.compat.zoo import init_nncontext

    before = dict(os.environ)
    os.environ["PYTHONPATH"] = PYTHONPATH
    yield init_nncontext({"spark.master": "local[2]", **CONF})
    kindler.stop()
    os.environ.clear()
    os.environ.update(before)
