"""The Keras that KINDLER_TEST_KERAS names, as in the core's tests of Keras."""

from __future__ import annotations

from tests.keras.conftest import _warm, flavour, keras

__all__ = ["_warm", "flavour", "keras"]
