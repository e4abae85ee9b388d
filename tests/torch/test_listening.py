"""What a run on this machine listens on: the loopback, and nothing of torch's own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Estimator, RunSettings
from kindler.callbacks import Callback
from tests.listening import listeners, wildcards

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

X = np.linspace(0, 1, 64, dtype=np.float32).reshape(32, 2)


class Look(Callback):
    def __init__(self, root: int, path: Path) -> None:
        self.root, self.path = root, path

    def on_step_end(self, run: Any) -> None:
        if run.rank == 0 and run.step == 2:
            self.path.write_text(json.dumps(listeners(self.root)))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_no_process_of_a_run_listens_on_a_wildcard_address(tmp_path: Path, shared_memory: bool) -> None:
    est = Estimator.from_torch(
        model=nn.Linear(2, 1),
        optimizer=torch.optim.Adam,
        loss=nn.MSELoss(),
        workers=2,
        settings=RunSettings(shared_memory=shared_memory),
    )
    look = Look(os.getpid(), tmp_path / "seen")
    est.fit({"x": X, "y": X.sum(1)}, epochs=1, batch_size=8, callbacks=[look], verbose=0)
    seen = json.loads((tmp_path / "seen").read_text())

    assert [address for _, address in seen] == ["127.0.0.1"]  # the meeting point alone
    assert wildcards(seen) == []
