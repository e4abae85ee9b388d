"""PyTorch modules and estimators keep the contract of a model kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kindler import Estimator
from kindler.testing.models import ModelKindContract

W = np.arange(6, dtype="float32").reshape(2, 3) - 2


def layer() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.ReLU())
    with torch.no_grad():
        model[0].weight.copy_(torch.from_numpy(W))  # type: ignore[operator]
    return model


class TestTorch(ModelKindContract):
    kind = "torch"

    @pytest.fixture
    def model(self) -> Any:
        return layer()

    @pytest.fixture
    def rows(self) -> Any:
        return np.random.default_rng(0).normal(size=(5, 3)).astype("float32")

    @pytest.fixture
    def expected(self, rows: Any) -> Any:
        return np.maximum(rows @ W.T, 0)

    @pytest.fixture
    def refused(self, tmp_path: Path) -> Any:
        path = tmp_path / "program.pt2"
        torch.export.save(torch.export.export(layer(), (torch.zeros(1, 3),)), path)
        return path


class TestEstimator(TestTorch):
    kind = "estimator"

    @pytest.fixture
    def model(self) -> Any:
        return Estimator.from_torch(model=layer())

    @pytest.fixture
    def refused(self) -> Any:
        pytest.skip("as for its model")
