"""The process that workers are forked from has imported what test modules need.

Workers unpickle what test modules define, and so import those with what stands at their head. They inherit
the part that most of them have in common.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kindler.engine import fork_server

_more: tuple[str, ...] = ()  # what the workers of the present tests inherit besides

_reach = fork_server._reach


def _with_imports_of_tests(recipe: fork_server.Recipe, owner: int, run: str) -> Any:
    if any(name.startswith("kindler.frameworks.") for name in recipe.preload):
        recipe = replace(recipe, preload=(*recipe.preload, "pytest", "kindler.estimator.estimator", *_more))
    return _reach(recipe, owner, run)


def end_warm_processes() -> None:
    fork_server.close()


def inherit_imports(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fork_server, "_reach", _with_imports_of_tests)


@pytest.fixture(scope="session", autouse=True)
def _warm() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        inherit_imports(patch)
        yield


@pytest.fixture(scope="module")
def inherits_lightning() -> Iterator[None]:
    """Workers inherit Lightning, for modules that import it: each worker would take six seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.warm._more", ("lightning",))
        yield
