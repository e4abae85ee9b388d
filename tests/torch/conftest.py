"""What all tests with PyTorch share."""

from __future__ import annotations

from tests.warm import _warm, inherits_lightning

__all__ = ["_warm", "inherits_lightning"]
