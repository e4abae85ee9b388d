"""What a run of a Keras model listens on: the loopback, and nothing of the backend's own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import problems
import pytest
import watchers
from flavour import two_unless_whole

from kindler import Estimator, RunSettings
from tests.listening import wildcards

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]


@two_unless_whole
def test_no_process_of_a_run_listens_on_a_wildcard_address(flavour: str, tmp_path: Path) -> None:
    est = Estimator.from_keras(
        model=problems.classifier,
        config={"flavour": flavour},
        workers=2,
        engine="local",
        settings=RunSettings(shared_memory=False),
    )
    look = watchers.Listeners(os.getpid(), tmp_path / "seen")
    est.fit(
        problems.problem(64),
        batch_size=16,
        feature_cols="x",
        label_cols="y",
        callbacks=[look],
        verbose=0,
    )
    seen = json.loads((tmp_path / "seen").read_text())

    assert [address for _, address in seen] == ["127.0.0.1"]  # the meeting point alone
    assert wildcards(seen) == []
