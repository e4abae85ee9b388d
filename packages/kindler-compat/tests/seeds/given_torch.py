"""What Orca's page leaves to its reader for PyTorch; workers import it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds.digits import digits
from tests.whole import WHOLE

__all__ = ["ENOUGH", "EPOCHS", "LeNet", "images", "train_loader_func"]

EPOCHS, ENOUGH = (2, 0.97) if WHOLE else (4, 0.8)


class LeNet(nn.Module):
    """A convolutional classifier of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(4 * 4 * 50, 500)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), dim=1)


def images(split: str) -> tuple[Any, Any]:
    """Digits between 0 and 1, with an axis of channels, and their labels."""
    x, y = digits(split)
    return x[:, None].astype(np.float32) / 255, y.astype(np.int64)


def train_loader_func(config: dict[str, Any], batch_size: int) -> Any:
    x, y = images("train")
    rows = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    return torch.utils.data.DataLoader(rows, batch_size=batch_size, shuffle=True)
