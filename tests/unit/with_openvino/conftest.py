"""What tests with OpenVINO share: those of units run in one process with tests/openvino."""

from __future__ import annotations

from tests.openvino.conftest import _warm

__all__ = ["_warm"]
