"""Checkpoints within an epoch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kindler.errors import NonFiniteLossError
from kindler.train.checkpoints import CheckpointWriter
from kindler.train.loss_guard import LossGuard
from kindler.train.options import FitOptions, RunConfig, Task
from kindler.train.run_start import Start
from kindler.train.triggers import SeveralIteration, end_of_epoch


def writer(folder: Path, guard: LossGuard, report: Any = None) -> CheckpointWriter:
    training = FitOptions(
        batch_size=1, epochs=2, shuffle=False, checkpoint_trigger=SeveralIteration(1), keep_checkpoints=1
    )
    task = Task(
        framework="torch", options=training, data=None, config=RunConfig(model_dir=str(folder)), run_id="r"
    )  # type: ignore[arg-type]
    start = Start(epoch=0, step=0)
    worker: Any = SimpleNamespace(rank=0, size=1, leads=True, replaceable=False, report=report)
    return CheckpointWriter(worker, task, counts=[8], start=start, look=guard.look)


def test_the_driver_hears_of_an_epochs_checkpoint_once_it_is_written(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []

    def report(name: str, **fields: Any) -> None:
        heard.append({"name": name, "files": len(list(tmp_path.glob("*.kindler"))), **fields})

    replica: Any = SimpleNamespace(epoch=1, step=8, freeze=lambda: lambda: [b"state"])
    with writer(tmp_path, LossGuard("raise", rank=0, tell=lambda message: None), report) as made:
        for epoch in (1, 2):
            replica.epoch = epoch
            made.after_epoch(replica, end_of_epoch(epoch, 8, {}), {"epoch": epoch}, last=epoch == 2)

    assert heard == [
        {"name": "saved", "files": 1, "epoch": 1, "ends": False},
        {"name": "saved", "files": 1, "epoch": 2, "ends": True},
    ]


def test_none_is_written_after_a_loss_that_was_not_looked_at_yet_and_is_not_a_number(tmp_path: Path) -> None:
    guard = LossGuard("raise", rank=0, tell=lambda message: None, clock=lambda: 0.0)
    replica: Any = SimpleNamespace(epoch=1, step=1)
    guard.note(1, float("nan"), lambda: ([], ""))  # as one on a GPU is, until several are looked at together

    with pytest.raises(NonFiniteLossError, match="step 1"):
        writer(tmp_path / "run", guard).after_step(replica, step_in_epoch=1, seconds=0.1)

    assert list(tmp_path.rglob("*")) == []
