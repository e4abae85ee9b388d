"""Graphs keep the contract of frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from kindler.compat.frameworks.tf_graph.replica import GraphReplica
from kindler.testing.replicas import ReplicaCase, ReplicaContract
from tests.tf_graph.graphs import Classifier


def _batches() -> list[Any]:
    random = np.random.default_rng(0)
    return [
        ((random.normal(size=(12, 4)).astype(np.float32),), (random.integers(0, 3, 12),)) for _ in range(3)
    ]


class TestGraph(ReplicaContract):
    framework = "tf_graph"
    preload = ("tensorflow.compat.v1",)

    @pytest.fixture
    def case(self) -> ReplicaCase:
        made = Classifier()
        spec = GraphReplica.make_spec(**made.arguments, optimizer=tf.train.AdamOptimizer(0.05), clip_norm=1.0)
        return ReplicaCase(spec=spec, batches=_batches())
