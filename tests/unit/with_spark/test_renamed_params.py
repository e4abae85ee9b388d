"""Params of stages that were saved under the names of then."""

from __future__ import annotations

import pytest

from kindler.ml.persistence import _renamed

pytestmark = pytest.mark.spark


def test_strategies_of_saved_stages_are_found_by_their_names_of_now() -> None:
    before = {"sync": "rounds", "syncOptions": {"every_steps": 3}, "epochs": 2}

    assert _renamed(before) == {"strategy": "local_sgd", "strategyOptions": {"every_steps": 3}, "epochs": 2}
    assert _renamed({"sync": "sharded"}) == {"strategy": "zero1"}
    assert _renamed({"strategy": "async"}) == {"strategy": "async"}
