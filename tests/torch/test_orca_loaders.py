"""The PyTorch programs of Orca's guide that train on loaders, with their import line changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kindler import Estimator, XShards  # the changed line

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

args = SimpleNamespace(lr=0.01, epochs=8)
IMAGES, LABELS = load_digits(return_X_y=True)
IMAGES = (IMAGES / 16).astype(np.float32)


class LeNet(nn.Module):
    """A small classifier of 8 x 8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10), nn.LogSoftmax(dim=1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.layers(image)


def train_loader_func(config: dict[str, Any], batch_size: int) -> DataLoader:
    dataset = TensorDataset(torch.from_numpy(IMAGES), torch.from_numpy(LABELS))
    return DataLoader(dataset, batch_size=batch_size, shuffle=True)


def test_a_loader_and_instances_of_model_and_optimizer() -> None:
    train_loader = train_loader_func({}, 64)
    xshards = XShards.partition({"x": IMAGES, "y": LABELS}, num_shards=2)

    torch.manual_seed(1)
    model = LeNet()  # a torch.nn.Module
    model.train()
    criterion = nn.NLLLoss()

    adam = torch.optim.Adam(model.parameters(), args.lr)
    est = Estimator.from_torch(model=model, optimizer=adam, loss=criterion)
    est.fit(data=train_loader, epochs=args.epochs)
    predictions = est.predict(xshards)

    scores = np.concatenate([shard["prediction"] for shard in predictions.collect()])
    assert np.mean(scores.argmax(1) == LABELS) > 0.9


def test_a_loader_function_and_creators_with_a_config() -> None:
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
    )
    est.fit(data=train_loader_func, epochs=args.epochs)

    assert np.mean(est.predict(IMAGES).argmax(1) == LABELS) > 0.9
