"""PyTorch keeps the contract of frameworks, and all-reduce that of syncs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gang import PRELOAD
from torch import nn

from kindler.frameworks.registry import FRAMEWORKS
from kindler.testing.replicas import ReplicaCase, ReplicaContract, cut
from kindler.testing.syncs import SyncContract

pytestmark = pytest.mark.torch

TorchReplica = FRAMEWORKS.load("torch")


def _batches() -> list[Any]:
    random = np.random.default_rng(0)
    return [
        ((random.normal(size=(12, 4)).astype(np.float32),), (random.integers(0, 3, 12),)) for _ in range(3)
    ]


def _classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


class TestTorch(ReplicaContract):
    framework = "torch"
    preload = PRELOAD

    @pytest.fixture
    def case(self) -> ReplicaCase:
        spec = TorchReplica.make_spec(
            model=_classifier,
            optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.05),
            # Weights of classes: a rank's mean does not count by its rows alone.
            loss=nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.5])),
            metrics=["accuracy"],
            clip_norm=1.0,
        )
        return ReplicaCase(spec=spec, batches=_batches())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("passes", [1, 3])
def test_means_of_ranks_by_weight_are_the_gradients_of_all_rows(reduction: str, passes: int) -> None:
    spec = TorchReplica.make_spec(
        model=_classifier,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        loss=nn.CrossEntropyLoss(reduction=reduction),
        accumulation_steps=passes,
    )
    features, labels = _batches()[0]
    whole = TorchReplica(spec, device="cpu").gradients(cut(features, labels, (12,)))
    parts = [
        TorchReplica(spec, device="cpu").gradients(cut(features, labels, (5, 7), rank)) for rank in (0, 1)
    ]

    weights = [part.weight for part in parts]
    for number, wanted in enumerate(whole.arrays):
        mean = np.average([part.arrays[number] for part in parts], axis=0, weights=weights)
        np.testing.assert_allclose(mean, wanted, rtol=0, atol=1e-5)


class TestAllReduce(SyncContract):
    sync = "allreduce"
    preload = PRELOAD
