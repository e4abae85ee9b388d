"""A model, creators and callbacks for the tests of Orca's estimator; workers import them from here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kindler.compat.zoo.orca.learn.pytorch.callbacks import Callback, MainCallback

X = np.random.default_rng(0).normal(size=(23, 3)).astype("float32")
Y = (X @ np.array([[1.0], [-2.0], [0.5]]) + 0.3).astype("float32")


def model_creator(config: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def optimizer_creator(model: nn.Module, config: dict[str, Any]) -> Any:
    return torch.optim.SGD(model.parameters(), config["lr"])


def scheduler_creator(optimizer: Any, config: dict[str, Any]) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def train_loader(config: dict[str, Any], batch_size: int) -> Any:
    rows = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return torch.utils.data.DataLoader(rows, batch_size=batch_size)


HOOKS = {
    f"{when}_{what}"
    for when in ("before", "after")
    for what in ("run", "train_epoch", "val_epoch", "train_iter", "val_iter")
}


class Diary(Callback):
    """Writes down which hooks are called, and what the runner looks like."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.lines: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in HOOKS:
            object.__getattribute__(self, "lines").append(name)
        return object.__getattribute__(self, name)

    def after_train_iter(self, runner: Any) -> None:
        assert len(runner.batch) == 2
        assert runner.output.shape == runner.batch[1].shape
        expected = nn.functional.mse_loss(runner.output, runner.batch[1])
        assert abs(float(runner.loss) - float(expected)) < 1e-5
        assert (runner.size, runner.config["lr"], runner.num_epochs) == (2, 0.1, 2)

    def after_run(self, runner: Any) -> None:
        runner.put("seen", 1)
        runner.update("seen", runner.get("seen") + 1)
        facts = {"hooks": self.lines, "stats": runner.epoch_stats, "steps": runner.global_step}
        Path(self.folder, f"{runner.rank}.json").write_text(json.dumps(facts))


class Halved(MainCallback):
    """Trains on half the loss."""

    def on_iter_forward(self, runner: Any) -> None:
        features, target = runner.batch
        runner.output, runner.target = runner.model(features), target
        runner.loss = 0.5 * runner.criterion(runner.output, target)


class StopEarly(Callback):
    def after_train_epoch(self, runner: Any) -> None:
        runner.stop = True


class OwnBackward(MainCallback):
    def on_iter_backward(self, runner: Any) -> None:
        runner.loss.backward()
