"""The Keras of this process: KINDLER_TEST_KERAS names it (tensorflow, jax, torch, or tf_keras)."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

from tests.whole import WHOLE

FLAVOUR = os.environ.get("KINDLER_TEST_KERAS", "tensorflow")

os.environ["KERAS_BACKEND"] = "tensorflow" if FLAVOUR == "tf_keras" else FLAVOUR
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

KERAS: Any = importlib.import_module("tf_keras" if FLAVOUR == "tf_keras" else "keras")

one_is_enough = pytest.mark.skipif(FLAVOUR != "tensorflow", reason="the same code for every backend")
one_unless_whole = pytest.mark.skipif(
    FLAVOUR != "tensorflow" and not WHOLE,
    reason="on TensorFlow; on every backend with KINDLER_TEST_WHOLE=1",
)
two_unless_whole = pytest.mark.skipif(
    FLAVOUR not in ("tensorflow", "torch") and not WHOLE,
    reason="on TensorFlow and PyTorch; on every backend with KINDLER_TEST_WHOLE=1",
)
