"""Which Keras the tests of this process use."""

from __future__ import annotations

from typing import Any

import flavour as chosen
import pytest

from tests.warm import _warm

__all__ = ["_warm", "flavour", "keras"]


@pytest.fixture(scope="session")
def flavour() -> str:
    return chosen.FLAVOUR


@pytest.fixture(scope="session")
def keras() -> Any:
    return chosen.KERAS
