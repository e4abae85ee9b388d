"""Checkpoints within an epoch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kindler.errors import NonFiniteLossError
from kindler.train.checkpoint_writer import CheckpointWriter
from kindler.train.loss_guard import LossGuard
from kindler.train.triggers import SeveralIteration


def writer(folder: Path, guard: LossGuard) -> CheckpointWriter:
    training: Any = SimpleNamespace(
        checkpoint_trigger=SeveralIteration(1),
        keep_checkpoints=1,
        best_metric=None,
        batch_size=1,
        steps_per_epoch=None,
        shuffle=False,
    )
    task: Any = SimpleNamespace(
        training=training, model_dir=str(folder), framework="torch", run_id="r", dealing=None, seed=0
    )
    start: Any = SimpleNamespace(first_epoch=0, first_step=0, rows=())
    worker: Any = SimpleNamespace(rank=0, size=1, leads=True)
    return CheckpointWriter(worker, task, counts=[8], start=start, look=guard.look)


def test_none_is_written_after_a_loss_that_was_not_looked_at_yet_and_is_not_a_number(tmp_path: Path) -> None:
    guard = LossGuard("raise", rank=0, tell=lambda message: None, clock=lambda: 0.0)
    replica: Any = SimpleNamespace(epoch=1, step=1)
    guard.note(1, float("nan"), lambda: ([], ""))  # as one on a GPU is, until several are looked at together

    with pytest.raises(NonFiniteLossError, match="step 1"):
        writer(tmp_path / "run", guard).after_step(replica, step_in_epoch=1, seconds=0.1)

    assert list(tmp_path.rglob("*")) == []
