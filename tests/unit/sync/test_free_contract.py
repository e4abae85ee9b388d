"""The contract suite of syncs whose ranks do not meet at every step, for those that Kindler has."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from kindler.testing.free_syncs import FreeSyncContract

pytestmark = pytest.mark.usefixtures("no_workers_left")


class TestHogwild(FreeSyncContract):
    sync = "async"


class TestLocked(FreeSyncContract):
    sync = "async"
    options: ClassVar[dict[str, Any]] = {"lock": True, "max_staleness": 1}


class TestRounds(FreeSyncContract):
    sync = "local_sgd"


class TestShortRounds(FreeSyncContract):
    sync = "local_sgd"
    options: ClassVar[dict[str, Any]] = {"every_steps": 2}
