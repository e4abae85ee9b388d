"""The process that workers are forked from is kept through failed runs, and has imported what tests need.

A run that fails ends that process, and the next run starts a new one, which imports the framework again. That
would be most of what a test of a failure costs. The suites of failures and of recovery run on the engine as
it ships all the same: they take the fixture `cold`.

Workers unpickle what test modules define, and so import those with what stands at their head. They inherit
the part that most of them have in common.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kindler.engine import fork_server, local

_more: tuple[str, ...] = ()  # what the workers of the present tests inherit besides

_clean_up = local._LocalLaunch.clean_up
_reach = fork_server._reach


def _as_if_it_had_not_failed(launch: Any, *, failed: bool) -> None:
    _clean_up(launch, failed=False)


def _with_imports_of_tests(recipe: fork_server.Recipe, owner: int) -> Any:
    if any(name.startswith("kindler.frameworks.") for name in recipe.preload):
        recipe = replace(recipe, preload=(*recipe.preload, "pytest", "kindler.estimator.estimator", *_more))
    return _reach(recipe, owner)


def keep_warm(patch: pytest.MonkeyPatch) -> None:
    """From now on a failed run leaves the warm process as it is."""
    patch.setattr(local._LocalLaunch, "clean_up", _as_if_it_had_not_failed)
    patch.setattr(fork_server, "_reach", _with_imports_of_tests)


@pytest.fixture(scope="session", autouse=True)
def _warm() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        keep_warm(patch)
        yield


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed run ends the warm process, as it does for users."""
    monkeypatch.setattr(local._LocalLaunch, "clean_up", _clean_up)


@pytest.fixture(scope="module")
def inherits_lightning() -> Iterator[None]:
    """Workers inherit Lightning, for modules that import it: each worker would take six seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.warm._more", ("lightning",))
        yield
