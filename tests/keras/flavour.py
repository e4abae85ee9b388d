"""The Keras of this process: KINDLER_TEST_KERAS names it (tensorflow, jax, torch, or tf_keras)."""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import tempfile
from typing import Any

import pytest

from tests.whole import WHOLE

FLAVOUR = os.environ.get("KINDLER_TEST_KERAS", "tensorflow")

os.environ["KERAS_BACKEND"] = "tensorflow" if FLAVOUR == "tf_keras" else FLAVOUR
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

if FLAVOUR != "torch":
    # Steps run a few times only: code that takes long to optimize is never made up for.
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
if FLAVOUR == "jax" and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # What was compiled for one test is there for the next: half of what a small fit takes.
    _compiled = tempfile.mkdtemp(prefix="kindler-tests-jax-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

KERAS: Any = importlib.import_module("tf_keras" if FLAVOUR == "tf_keras" else "keras")

# What one backend shows is shown on the one that compiles nothing, and so is by far the cheapest.
one_is_enough = pytest.mark.skipif(FLAVOUR != "torch", reason="the same code for every backend")
tensorflow_only = pytest.mark.skipif(FLAVOUR != "tensorflow", reason="a thing of TensorFlow's")


def unless_whole(*flavours: str) -> Any:
    """A mark: on these only, unless everything runs."""
    return pytest.mark.skipif(
        FLAVOUR not in flavours and not WHOLE,
        reason=f"on {', '.join(flavours)}; on every backend with KINDLER_TEST_WHOLE=1",
    )


one_unless_whole = unless_whole("torch")
two_unless_whole = unless_whole("torch", "tensorflow")
tensorflow_unless_whole = unless_whole("tensorflow")
keras2_unless_whole = unless_whole("torch", "tf_keras")  # the cheapest on which TensorFlow computes

# What ranks of `kindler.testing` inherit; each would import it otherwise.
PRELOAD = (KERAS.__name__, "kindler.frameworks.keras.replica")
