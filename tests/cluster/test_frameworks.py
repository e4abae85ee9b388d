"""Real programs of TensorFlow, PyTorch and JAX that find each other through what the cluster sets."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from kindler import cluster

W, B = 3.0, -2.0


def parameter_servers(args: Any, ctx: Any) -> Any:
    """A linear model under ParameterServerStrategy: a chief, a worker, and a server that holds it."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if ctx.role != "chief":
        ctx.serve()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        w, b = tf.Variable(0.0), tf.Variable(0.0)

    @tf.function
    def step() -> Any:
        x = tf.random.stateless_uniform([64], [1, 2], -1.0, 1.0)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((w * x + b - (W * x + B)) ** 2)
        for variable, gradient in zip((w, b), tape.gradient(loss, (w, b)), strict=True):
            variable.assign_sub(0.3 * gradient)

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    for _ in range(60):
        coordinator.schedule(step)
    coordinator.join()
    return float(w.numpy()), float(b.numpy()), w.device


def torch_gang(args: Any, ctx: Any) -> tuple[int, float, list[float]]:
    """All-reduce over gloo, from the variables alone, and rows of the feed as tensors."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(float(ctx.rank + 1))
    dist.all_reduce(total)
    feed = ctx.data_feed(input_mapping=["x"])
    loader = torch.utils.data.DataLoader(feed.as_torch_iterable(4), batch_size=None)
    rows = [value for batch in loader for value in batch["x"].tolist()]
    dist.destroy_process_group()
    return dist.get_rank() if dist.is_initialized() else ctx.rank, float(total), rows


def needs(package: str) -> Any:
    """Not by importing it: this process does without."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@needs("tensorflow")
def test_parameter_servers_hold_what_workers_train() -> None:
    options = {"ps": 1, "until": "chief", "env": {"TF_CPP_MIN_LOG_LEVEL": "2"}}
    with cluster.run(parameter_servers, None, 2, **options) as running:  # type: ignore[arg-type]
        pass
    (w, b, device), *others = running.return_values

    assert w == pytest.approx(W, abs=0.05)
    assert b == pytest.approx(B, abs=0.05)
    assert "ps" in device
    assert others == [None, None]


@needs("torch")
def test_torch_programs_meet_and_read_the_feed_as_tensors() -> None:
    with cluster.run(torch_gang, None, 2, framework="torch", input_mode="spark") as running:
        running.train({"x": np.arange(100, dtype=np.float32)})
    (first, total, rows), (second, also, others) = running.return_values

    assert (first, second) == (0, 1)
    assert total == also == 3.0
    assert sorted(rows + others) == list(range(100))
