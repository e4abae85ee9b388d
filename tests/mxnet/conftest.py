"""What all tests with MXNet share; without MXNet there are none."""

from __future__ import annotations

import importlib.util

from tests.warm import _warm, cold

__all__ = ["_warm", "cold"]

collect_ignore_glob = [] if importlib.util.find_spec("mxnet") else ["test_*.py"]
