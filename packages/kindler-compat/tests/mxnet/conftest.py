"""What all tests with MXNet share; where it does not run there is one, which says why."""

from __future__ import annotations

from tests.mxnet.here import WHY_NOT
from tests.warm import _warm

__all__ = ["_warm"]

collect_ignore_glob = [] if WHY_NOT is None else ["test_[!h]*.py"]
