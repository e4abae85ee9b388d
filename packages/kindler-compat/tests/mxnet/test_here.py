"""MXNet on this machine."""

from __future__ import annotations

import importlib

import pytest

from tests.mxnet.here import WHY_NOT


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_it_is_the_version_that_is_supported() -> None:
    assert importlib.import_module("kindler.compat.frameworks.mxnet.library").mx.__version__ == "1.9.1"


@pytest.mark.skipif(WHY_NOT is None or "loaded" not in WHY_NOT, reason="MXNet can be loaded")
def test_where_it_cannot_be_loaded_the_error_says_so() -> None:
    with pytest.raises(ImportError, match="MXNet is installed but cannot be loaded on this machine: lib"):
        importlib.import_module("kindler.compat.frameworks.mxnet.library")
