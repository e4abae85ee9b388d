"""What all tests with PyTorch share."""

from __future__ import annotations

from tests.warm import _warm, cold, inherits_lightning

__all__ = ["_warm", "cold", "inherits_lightning"]
