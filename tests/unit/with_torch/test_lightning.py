"""Replicas of LightningModules: schedules that watch a figure, and what a trainer says of its rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kindler.errors import ConfigError
from kindler.frameworks.torch.lightning_replica import LightningReplica, Trainer
from tests.torch.test_lightning import Classifier

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("inherits_lightning", "no_workers_left")]


class Plateau(Classifier):
    """Returns lists, and a schedule that watches what validation logs."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, "max", factor=0.1, patience=0, threshold=9.0
        )
        return [optimizer], [{"scheduler": schedule, "monitor": "val_acc", "frequency": 1}]


def test_a_schedule_is_shown_the_figure_that_it_monitors_or_says_that_there_is_none() -> None:
    replica = LightningReplica(LightningReplica.make_spec(model=Plateau()), device="cpu")
    rates = []
    for epoch in (1, 2, 3):
        replica.begin_epoch(epoch)
        replica.end_epoch({"loss": 1.0, "val_acc": 0.5})
        rates.append(replica.learning_rate())

    assert rates == [1.0, pytest.approx(0.1), pytest.approx(0.01)]
    with pytest.raises(ConfigError, match="monitors 'val_acc', and the epoch's metrics are 'loss'"):
        replica.end_epoch({"loss": 1.0})


def test_the_local_rank_is_the_number_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    trainer = Trainer(LightningReplica(LightningReplica.make_spec(model=Classifier()), rank=3, device="cpu"))

    assert (trainer.global_rank, trainer.local_rank) == (3, 1)
