"""What all tests with graphs share."""

from __future__ import annotations

from tests.warm import _warm

__all__ = ["_warm"]
