"""What tests with PyTorch share: those of units run in one process with tests/torch."""

from __future__ import annotations

from tests.torch.conftest import _warm, inherits_lightning

__all__ = ["_warm", "inherits_lightning"]
