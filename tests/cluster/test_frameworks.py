"""Real programs of TensorFlow, PyTorch and JAX that find each other through what the cluster sets."""

from __future__ import annotations

import importlib.util
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kindler import cluster
from tests.cluster import programs
from tests.whole import whole_only

W, B = 3.0, -2.0
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}


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


def tensorflow_feed(args: Any, ctx: Any) -> tuple[list[float], list[bytes], list[Any], str]:
    """Reads the feed as a dataset, and exports what it made of it."""
    import tensorflow as tf

    feed = ctx.data_feed(input_mapping={"x": "number", "name": "text"})
    dataset = feed.as_tf_dataset(4)
    batches = list(dataset)
    module = tf.Module()
    module.total = tf.Variable(sum(float(tf.reduce_sum(batch["number"])) for batch in batches))
    module.get = tf.function(lambda: module.total, input_signature=[])
    numbers = [float(x) for batch in batches for x in batch["number"]]
    texts = [text for batch in batches for text in batch["text"].numpy().tolist()]
    shape = dataset.element_spec["number"].shape.as_list()
    return numbers, texts, shape, ctx.export_saved_model(module, args)


def jax_gang(args: Any, ctx: Any) -> tuple[int, int, list[int]]:
    """Processes that meet at the coordinator."""
    import jax
    from jax.experimental import multihost_utils

    jax.distributed.initialize(**ctx.jax_distributed)
    everybody = multihost_utils.process_allgather(np.array([ctx.rank + 1]))
    return jax.process_index(), jax.process_count(), np.asarray(everybody).ravel().tolist()


def needs(package: str) -> Any:
    """Not by importing it: this process does without."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@needs("tensorflow")
def test_parameter_servers_hold_what_workers_train() -> None:
    options = {"ps": 1, "until": "chief", "env": QUIET}
    with cluster.run(parameter_servers, None, 2, **options) as running:  # type: ignore[arg-type]
        pass
    (w, b, device), *others = running.return_values

    assert w == pytest.approx(W, abs=0.05)
    assert b == pytest.approx(B, abs=0.05)
    assert "ps" in device
    assert others == [None, None]


@needs("tensorflow")
def test_a_dataset_has_every_row_of_the_feed_and_a_model_is_exported_once(tmp_path: Path) -> None:
    rows = {"x": np.arange(50, dtype=np.float32), "name": np.array([f"n{i}" for i in range(50)])}
    target = str(tmp_path / "model")
    with cluster.run(tensorflow_feed, target, 2, input_mode="spark", env=QUIET) as running:
        running.train(rows)
    (numbers, texts, shape, written), (others, more_texts, _, elsewhere) = running.return_values

    assert sorted(numbers + others) == list(range(50))
    assert texts + more_texts == [f"n{int(x)}".encode() for x in numbers + others]
    assert shape == [None]
    assert written == target != elsewhere
    assert [path.parent for path in tmp_path.rglob("saved_model.pb")] == [tmp_path / "model"]


@needs("jax")
def test_jax_programs_meet_at_the_coordinator() -> None:
    with cluster.run(jax_gang, None, 2, framework="jax") as running:
        pass

    assert running.return_values == [(0, 2, [1, 2]), (1, 2, [1, 2])]


@whole_only
@needs("tensorboard")
def test_tensorboard_answers_while_the_cluster_runs(tmp_path: Path) -> None:
    options: dict[str, Any] = {"input_mode": "spark", "framework": None, "log_dir": str(tmp_path)}
    with cluster.run(programs.wait_for_nothing, None, 1, tensorboard=True, **options) as running:
        url = running.tensorboard_url()
        page = eventually(lambda: urllib.request.urlopen(f"{url}/data/logdir", timeout=60).read())

    assert str(tmp_path).encode() in page
    with pytest.raises(OSError, match="refused|reset"):
        urllib.request.urlopen(f"{url}/data/logdir", timeout=60)


def eventually(get: Any) -> Any:
    """What it gives once it does not raise; a minute at most."""
    pause, deadline = threading.Event(), time.monotonic() + 60
    while True:
        try:
            return get()
        except OSError:
            if time.monotonic() > deadline:
                raise
            pause.wait(0.2)


@needs("torch")
def test_torch_programs_meet_and_read_the_feed_as_tensors() -> None:
    with cluster.run(torch_gang, None, 2, framework="torch", input_mode="spark") as running:
        running.train({"x": np.arange(100, dtype=np.float32)})
    (first, total, rows), (second, also, others) = running.return_values

    assert (first, second) == (0, 1)
    assert total == also == 3.0
    assert sorted(rows + others) == list(range(100))
