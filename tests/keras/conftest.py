"""Which Keras the tests of this process use."""

from __future__ import annotations

from typing import Any

import flavour as chosen
import pytest

from tests.warm import _warm, cold

__all__ = ["_warm", "cold", "flavour", "keras"]


@pytest.fixture(scope="session")
def flavour() -> str:
    return chosen.FLAVOUR


@pytest.fixture(scope="session")
def keras() -> Any:
    return chosen.KERAS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that press Ctrl-C here come first: after libraries that others load it is a crash."""
    items.sort(key=lambda item: "test_sessions" not in item.nodeid)
