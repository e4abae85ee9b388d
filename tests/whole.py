"""Tests that run small, or not at all, unless `KINDLER_TEST_WHOLE=1` asks for the whole of them."""

from __future__ import annotations

import os

import pytest

__all__ = ["WHOLE", "whole_only"]

WHOLE = os.environ.get("KINDLER_TEST_WHOLE") == "1"
whole_only = pytest.mark.skipif(not WHOLE, reason="runs with KINDLER_TEST_WHOLE=1 only")
