"""The process that workers are forked from is kept through failed runs.

A run that fails ends that process, and the next run starts a new one, which imports the framework again. That
would be most of what a test of a failure costs. Tests that are about this take the fixture `cold`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from kindler.engine import fork_server

_retire = fork_server.retire


def _unless_failed(owner: int | None = None) -> None:
    if sys.exc_info()[0] is None:
        _retire(owner)


@pytest.fixture(scope="session", autouse=True)
def _warm() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "retire", _unless_failed)
        yield


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed run ends the warm process, as it does for users."""
    monkeypatch.setattr(fork_server, "retire", _retire)
