"""MXNet keeps the contract of frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kindler.compat.frameworks.mxnet.library import mx
from kindler.compat.frameworks.mxnet.replica import MxnetReplica
from kindler.testing.replicas import ReplicaCase, ReplicaContract


def _batches() -> list[Any]:
    random = np.random.default_rng(0)
    return [
        ((random.normal(size=(12, 4)).astype(np.float32),), (random.integers(0, 3, 12),)) for _ in range(3)
    ]


def _classifier(config: dict[str, Any]) -> Any:
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Dense(6, activation="tanh", in_units=4), mx.gluon.nn.Dense(3, in_units=6))
    net.initialize(mx.init.Xavier())
    return net


class TestMxnet(ReplicaContract):
    framework = "mxnet"
    preload = ("numpy", "kindler.compat.frameworks.mxnet.replica")

    @pytest.fixture
    def case(self) -> ReplicaCase:
        spec = MxnetReplica.make_spec(
            config={"optimizer": "adam", "optimizer_params": {"learning_rate": 0.05}},
            model_creator=_classifier,
            loss_creator=lambda config: mx.gluon.loss.SoftmaxCrossEntropyLoss(),
            eval_metrics_creator=lambda config: [mx.metric.Accuracy(), mx.metric.MAE()][:1],
        )
        return ReplicaCase(spec=spec, batches=_batches())
