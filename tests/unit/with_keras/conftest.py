"""What tests with Keras share: those of units run in one process with tests/keras."""

from __future__ import annotations

from tests.keras.conftest import _warm, flavour, keras

__all__ = ["_warm", "flavour", "keras"]
