"""Orca's PyTorch programs on XShards: prints what came out, as JSON.

Between the lines of the guide stands only what it leaves to its reader: the model, the data, the session.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import kindler
from kindler import (
    Estimator,  # was: from zoo.orca.learn.pytorch import Estimator
    XShards,  # was: from zoo.orca.data import XShards
)

args = SimpleNamespace(lr=1e-2, epochs=3)


class LeNet(nn.Module):
    """A convolutional classifier of 8 x 8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(2 * 2 * 32, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), dim=1)


def digits() -> dict[str, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    return {"x": (images / 16).reshape(-1, 1, 8, 8), "y": labels}


def with_instances(xshards: XShards) -> tuple[Any, XShards, Any]:
    model = LeNet()  # a torch.nn.Module
    model.train()
    criterion = nn.NLLLoss()

    adam = torch.optim.Adam(model.parameters(), args.lr)
    est = Estimator.from_torch(model=model, optimizer=adam, loss=criterion)

    stats = est.fit(data=xshards, epochs=args.epochs)
    predictions = est.predict(xshards)
    return stats, predictions, est


def with_creators(xshards: XShards) -> tuple[Any, XShards, Any]:
    def model_creator(config: dict[str, Any]) -> nn.Module:
        model = LeNet()  # a torch.nn.Module
        model.train()
        return model

    def optimizer_creator(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), config["lr"])

    est = Estimator.from_torch(
        model=model_creator,
        optimizer=optimizer_creator,
        loss=nn.NLLLoss(),
        config={"lr": 1e-2},
    )  # without backend="torch_distributed"

    stats = est.fit(data=xshards, epochs=args.epochs)
    predictions = est.predict(data=xshards)
    return stats, predictions, est


def main() -> None:
    kindler.init()
    torch.manual_seed(1)
    data = digits()
    xshards = XShards.partition(data)
    seen: dict[str, Any] = {"engine": xshards.engine, "num_samples": [], "accuracy": [], "shapes": []}
    for program in (with_instances, with_creators):
        stats, predictions, est = program(xshards)
        scores = np.concatenate([shard["prediction"] for shard in predictions.collect()])
        assert est.evaluate(data=xshards)["num_samples"] == len(scores)
        seen["num_samples"].append(stats["num_samples"])
        seen["shapes"].append([scores.shape])
        seen["accuracy"].append(float((scores.argmax(1) == data["y"]).mean()))
    print()  # noqa: T201
    print(json.dumps(seen))  # noqa: T201


if __name__ == "__main__":
    main()
