"""ResNet-50 and BERT-base with random weights, for `serve_gpu.py` and `gpu.py`; small ones for CPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

TOKENS = 128


class Block(nn.Module):
    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.layers = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, outer, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.past: nn.Module = nn.Identity()
        if stride != 1 or width != outer:
            self.past = nn.Sequential(nn.Conv2d(width, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.layers(x) + self.past(x))


class ResNet(nn.Module):
    """Of He et al., for images from 0 to 255, rows first, then channels. By default ResNet-50."""

    def __init__(self, blocks: Any = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        layers, before = [], width
        for stage, count in enumerate(blocks):
            inner = width << stage
            for number in range(count):
                layers.append(Block(before, inner, 2 if stage and not number else 1))
                before = 4 * inner
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(before, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = (image.to(self.head.weight.dtype) - 118.0) / 58.0
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def resnet(small: bool) -> tuple[ResNet, dict[str, Any]]:
    """The model, and the arguments that it is made with; its norms have seen some images."""
    init = {"blocks": [1, 1, 1, 1], "width": 8, "classes": 100} if small else {"blocks": [3, 4, 6, 3]}
    torch.manual_seed(0)
    model = ResNet(**init)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the mean of all that it sees
    with torch.no_grad():
        model(torch.from_numpy(images(8, small)))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    return model.eval(), init


def bert(small: bool) -> Any:
    import transformers

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = transformers.BertConfig(**(sizes if small else {}), num_labels=64, initializer_range=0.05)
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config).eval()


def images(count: int, small: bool = False) -> np.ndarray[Any, Any]:
    """Coarse coloured patterns, so that a network without training tells them apart."""
    random = np.random.default_rng(1)
    size = 64 if small else 224
    coarse = random.integers(0, 256, (count, 3, 4, 4), dtype=np.uint8)
    coarse[:, :, ::2] //= random.integers(1, 5, (count, 1, 1, 1), dtype=np.uint8)
    return np.ascontiguousarray(coarse.repeat(size // 4, 2).repeat(size // 4, 3))


def texts(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(2).integers(1000, 30_000, (count, TOKENS))
