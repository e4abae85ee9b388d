"""What all tests with OpenVINO share."""

from __future__ import annotations

from tests.warm import _warm

__all__ = ["_warm"]
