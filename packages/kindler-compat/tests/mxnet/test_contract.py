"""MXNet keeps the contract of frameworks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from kindler.compat.frameworks.mxnet.library import mx
from kindler.compat.frameworks.mxnet.replica import MxnetReplica
from kindler.frameworks.base import unpacked
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


def _spec() -> Any:
    return MxnetReplica.make_spec(
        config={"optimizer": "adam", "optimizer_params": {"learning_rate": 0.05}},
        model_creator=_classifier,
        loss_creator=lambda config: mx.gluon.loss.SoftmaxCrossEntropyLoss(),
        eval_metrics_creator=lambda config: mx.metric.Accuracy(),
    )


class TestMxnet(ReplicaContract):
    framework = "mxnet"
    preload = ("numpy", "kindler.compat.frameworks.mxnet.replica")

    @pytest.fixture
    def case(self) -> ReplicaCase:
        return ReplicaCase(spec=_spec(), batches=_batches())


def test_local_states_of_earlier_versions_count_together_on_other_ranks() -> None:
    replica = MxnetReplica(_spec())
    now = unpacked(replica.local_state())[0]["own"]
    earlier = [
        json.dumps(
            {"own": now, "tallies": json.dumps([rows, {"loss": [total, rows]}]), "rows": rows, "buffers": {}}
        )
        for rows, total in ((4, 2.0), (12, 14.0))
    ]
    replica.join_local_states([state.encode() for state in earlier], size=1)
    assert replica.running_loss() == 1.0  # 16 of 16 rows
    assert replica.epoch_rows == 16
